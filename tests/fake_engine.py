"""An inference client that answers by itself, as strict as vLLM is and stricter where vLLM says nothing.

It speaks both ways in which pictures reach an engine: files in `content_parts`, and tensors in `features`.
"""

import random
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField

from skyrl_maze.pictures import take_out
from skyrl_maze.trajectory import Picture
from skyrl_maze.vision import PictureReader

Answer = tuple[list[int], str]


class FakeEngine:
    """Samples with `answer(prompt ids, max_tokens) -> (ids, finish reason)`.

    Args:
        reader: reads pictures as vLLM does.
        image_id: the token that stands for a part of a picture.
        answer: the policy.
        knows_files: whether `content_parts` is understood; if not, it is ignored, as older engines do.
        trouble: called before each answer; may raise.
    """

    model_name = "base"

    def __init__(
        self,
        reader: PictureReader,
        image_id: int,
        answer: Callable[[list[int], int], Answer],
        knows_files: bool = True,
        trouble: Callable[[], None] = lambda: None,
    ) -> None:
        self.reader, self.image_id, self.answer = reader, image_id, answer
        self.knows_files, self.trouble = knows_files, trouble
        self.proxy_url = "http://engine"
        self.weight_version = 3
        self.finished: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.rendered = 0

    def _get_semaphores(self) -> tuple[None, None]:
        return None, None

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)

    async def _post(self, url: str, json: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        assert url == "http://engine/inference/v1/generate"
        self.trouble()
        body = {**json, "session_id": headers["X-Session-ID"]}
        self.requests.append(body)
        pictures = [self.reader.read(part["url"]) for part in body["content_parts"] if self.knows_files]
        prompt, places = self._expanded(body["token_ids"], pictures)
        ids, reason = self.answer(prompt, body["sampling_params"]["max_tokens"])
        reply = {
            "choices": [
                {
                    "token_ids": ids,
                    "finish_reason": reason,
                    "logprobs": {"content": [{"logprob": logprob(token)} for token in ids]},
                }
            ],
        }
        if self.knows_files:
            reply |= {"prompt_token_ids": prompt, "mm_placeholders": {"image": places}}
        return reply

    async def generate(self, batch: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        self.trouble()
        [prompt], [features] = batch["prompt_token_ids"], batch.get("mm_features") or [None]
        self.requests.append({**batch, "model": model})
        if features is not None:
            places = features["mm_placeholders"]["image"]
            covered = [i for p in places for i in range(p["offset"], p["offset"] + p["length"])]
            assert covered == [i for i, token in enumerate(prompt) if token == self.image_id]
            assert len(features["mm_hashes"]["image"]) == len(features["kwargs_data"]["image"]) == len(places)
        ids, reason = self.answer(prompt, batch["sampling_params"]["max_tokens"])
        return {
            "responses": ["the text is not looked at<|im_end|>"],
            "response_ids": [ids],
            "stop_reasons": [reason],
            "response_logprobs": [[logprob(token) for token in ids]],
        }

    async def render_chat_completion(self, request: dict[str, Any]) -> dict[str, Any]:
        self.trouble()
        _, urls = take_out(request["json"]["messages"])
        pictures = [self.reader.read(url) for url in urls]
        self.rendered += len(pictures)
        ids, places = self._expanded([self.image_id] * len(pictures), pictures)
        features = {
            "mm_hashes": {"image": [str(hash(url)) for url in urls]},
            "mm_placeholders": {"image": places},
            "kwargs_data": {"image": [_encoded(picture) for picture in pictures]},
        }
        return {"token_ids": ids, "features": features}

    def _expanded(self, ids: list[int], pictures: list[Picture]) -> tuple[list[int], list[dict[str, int]]]:
        expanded: list[int] = []
        places: list[dict[str, int]] = []
        waiting = list(pictures)
        for token in ids:
            if token == self.image_id and waiting:
                tokens = waiting.pop(0).tokens
                places.append({"offset": len(expanded), "length": tokens})
                expanded += [token] * tokens
            else:
                expanded.append(token)
        return expanded, places


def logprob(token: int) -> float:
    """What this engine says of a sampled token; it lets a test tell whose log-probability it sees."""
    return -0.001 * (token + 1)


def random_policy(tokens: list[int], end_id: int, seed: int) -> Callable[[list[int], int], Answer]:
    """Answers of random ids and lengths: ended, cut, or empty."""
    rng = random.Random(seed)

    def answer(_prompt: list[int], max_tokens: int) -> Answer:
        length = rng.randint(0, max_tokens)
        ids = rng.choices(tokens, k=length)
        if length == max_tokens:
            return ids, "length"
        return ([*ids, end_id], "stop") if rng.random() < 0.8 else (ids, "stop")

    return answer


def _encoded(picture: Picture) -> str:
    import torch

    fields = {"pixel_values": picture.pixel_values, "image_grid_thw": torch.tensor(picture.grid)}
    shared = MultiModalSharedField(batch_size=1)
    return encode_mm_kwargs_item(
        MultiModalKwargsItem({name: MultiModalFieldElem(data, shared) for name, data in fields.items()})
    )
