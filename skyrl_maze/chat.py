"""A chat template as token ids: how a conversation opens, and what follows after each answer.

A conversation is only ever appended to: the opening, the sampled ids, what follows, the next sampled ids.
That is right for templates that write a conversation the way it grew, and `ChatFormat` refuses all others:
one that drops earlier reasoning, say, would train the policy on histories that no chat server shows it.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from loguru import logger

from skyrl_maze.errors import ConfigError
from skyrl_maze.pictures import PLACE, Message

_MARK = "the-answer-5e1f"  # an answer that no template contains, to find its place
_QUESTION: Message = {"role": "user", "content": "q"}
_SHOWN: Message = {"role": "user", "content": [PLACE, {"type": "text", "text": "q"}]}
# The ways in which models write what they think; the last is a long answer without any mark.
_REASONED = (
    *(
        f"{begin}\nsome reasoning\n{end}\n\nplain"
        for begin, end in (
            ("<think>", "</think>"),
            ("<thinking>", "</thinking>"),
            ("<reasoning>", "</reasoning>"),
            ("[THINK]", "[/THINK]"),
            ("◁think▷", "◁/think▷"),
        )
    ),
    "a long answer " * 40 + "plain",
)
_ROUNDS = 32  # more than a template that keeps the last few messages would keep


class ChatFormat:
    """Turns messages into ids with a tokenizer's chat template, or another one.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: a Jinja chat template to use instead of the tokenizer's own.
        kwargs: further arguments of the template.
        vision_ids: ids that stand for pictures; no text may form one.

    Raises:
        ConfigError: the template rewrites what came before, or closes no turn with a special token.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        kwargs: dict[str, Any] | None = None,
        vision_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = {**(kwargs or {}), **({"chat_template": template} if template else {})}
        added = tokenizer.added_tokens_decoder
        vision_ids = {token_id for token_id in vision_ids if token_id < len(tokenizer)}
        self._special = {
            *tokenizer.all_special_tokens,
            *(str(token) for token in added.values() if token.special),
            *tokenizer.convert_ids_to_tokens(list(vision_ids)),
        }
        self._special_pattern = re.compile("|".join(map(re.escape, sorted(self._special, reverse=True))))
        self._longest_special = max(map(len, self._special))
        self._hidden = {*tokenizer.convert_tokens_to_ids(list(self._special)), *vision_ids}
        self._check()
        self.end_of_turn_id = self._end_of_turn()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation's first messages and the start of the answer; one image token a picture."""
        return self._encode(self._render(self._harmless(messages)))

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Ids between an end-of-turn token and the next answer: new messages and the start of the answer."""
        return self._encode(self._tail(self._harmless(messages)))[1:]

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        shown = [token for token in ids if token not in self._hidden and token != self.end_of_turn_id]
        return self._spaced(
            self._tokenizer.decode(shown, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[Message], answer_follows: bool = True) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_follows, **self._kwargs
            )
        )

    def _tail(self, messages: Sequence[Message], answer_follows: bool = True) -> str:
        """What the template writes after an answer, up to the start of the next one."""
        asked = [_QUESTION, {"role": "assistant", "content": _MARK}, *messages]
        _, mark, tail = self._render(asked, answer_follows).partition(_MARK)
        if not mark:
            raise ConfigError("the chat template leaves the assistant's answers out; give another one")
        return tail

    def _spaced(self, text: str) -> str:
        return self._special_pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    def _harmless(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a space in every special token that their text spells out.

        Text is data: an echo of `<|image_pad|>` may not become a picture, nor `<|im_end|>` end a turn.
        """

        def clean(content: Any) -> Any:
            if isinstance(content, str):
                return self._spaced(content)
            if not isinstance(content, list):
                return content
            parts, before = [], ""  # a token may have begun at the end of the part before
            for part in content:
                text = part.get("text") if isinstance(part, dict) else part
                if not isinstance(text, str):
                    parts.append(part)
                    before = ""
                    continue
                text = self._spaced(text)
                rest = text.lstrip()
                if self._special_pattern.search(before.rstrip() + rest):
                    text = f"{rest[:1]} {rest[1:]}"
                parts.append({**part, "text": text} if isinstance(part, dict) else text)
                before = (before + text)[-self._longest_special :]
            return parts

        return [{**message, "content": clean(message.get("content"))} for message in messages]

    def _check(self) -> None:
        self._check_growth("answers", _QUESTION, "plain")
        for answer in _REASONED:
            self._check_growth("the reasoning in earlier answers", _QUESTION, answer)
        try:
            self._check_growth("the pictures of earlier turns", _SHOWN, "plain")
        except (TypeError, jinja2.TemplateError) as error:
            logger.info(f"the chat template takes no pictures: {error}")
        if self._grown(_QUESTION, " plain\n") != self._written(_QUESTION, " plain\n"):
            logger.warning(
                "the chat template trims the blanks around an answer; training keeps them as sampled"
            )

    def _check_growth(self, what: str, question: Message, answer: str) -> None:
        grown, written = self._grown(question, answer), self._written(question, answer)
        if grown != written:
            raise ConfigError(
                f"the chat template rewrites {what}: a conversation that grows turn by turn would not be the "
                "one that it writes, so the policy would train on histories that no chat server shows it; "
                "use a checkpoint without thinking (-Instruct), or set generator.chat_template to a template "
                f"that keeps what was said\n  grown:   {grown[:400]!r}\n  written: {written[:400]!r}"
            )

    def _grown(self, question: Message, answer: str) -> str:
        return self._render([question]) + _ROUNDS * (answer + self._tail([question]))

    def _written(self, question: Message, answer: str) -> str:
        return self._render([*_ROUNDS * [question, {"role": "assistant", "content": answer}], question])

    def _end_of_turn(self) -> int:
        closing = self._encode(self._tail([], answer_follows=False))
        going_on = self._encode(self._tail([_QUESTION]))
        if (
            not closing
            or closing[:1] != going_on[:1]
            or closing[0] not in {*self._hidden, *self._tokenizer.get_added_vocab().values()}
        ):
            raise ConfigError(
                "the chat template closes an answer with no special token, or with another one at the end "
                f"({self._tokenizer.decode(going_on[:1])!r}, {self._tokenizer.decode(closing[:1])!r}), "
                "so the end of a turn cannot be told; set generator.chat_template to one that does"
            )
        return closing[0]
