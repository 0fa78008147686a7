"""SkyRL's trainer with group statistics over what lives, and examples that can be read."""

from skyrl_maze import _compat

_compat.install()

from typing import Any  # noqa: E402

from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.train.generators.base import GeneratorInput, GeneratorOutput  # noqa: E402
from skyrl.train.utils.trajectory_logging import pretty_print_example  # noqa: E402

from skyrl_maze.adapter_trainer import AdapterTrainer  # noqa: E402
from skyrl_maze.advantages import TOLERANCE, rows_without_signal  # noqa: E402

_compat.count_passes_by_success()
_compat.average_environment_metrics()


class MazeTrainer(AdapterTrainer):
    """SkyRL's trainer; lost episodes take no part in its statistics, and its examples can be read."""

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        # SkyRL prints the dataset's prompt and decoded image tokens; `generate` prints the conversation.
        self._example_interval, cfg.trainer.print_example_interval = cfg.trainer.print_example_interval, 0
        super().__init__(cfg, *args, **kwargs)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        output = await super().generate(input_batch)
        if self._example_interval > 0 and self.global_step % self._example_interval == 0:
            chat = output["chats"][0]
            first = next((i for i, message in enumerate(chat) if message["role"] == "assistant"), len(chat))
            response = "\n".join(f"[{message['role']}] {message['content']}" for message in chat[first:])
            pretty_print_example(logger, chat[:first], response, output["rewards"][0])
        return output

    def postprocess_generator_output(
        self, generator_output: GeneratorOutput, uids: list[str], *args: Any, **kwargs: Any
    ) -> tuple[GeneratorOutput, list[str]]:
        """SkyRL's step, whose zero-variance filter leaves rewards per token alone."""
        filtered: set[int] = set()
        algorithm = self.cfg.trainer.algorithm
        if algorithm.zero_variance_filter and self.cfg.generator.n_samples_per_prompt > 1:
            tolerance = max(TOLERANCE, algorithm.zero_variance_filter_tol)
            masks = generator_output["loss_masks"]
            filtered = set(rows_without_signal(generator_output["rewards"], uids, masks, tolerance))
            generator_output["loss_masks"] = [
                [0] * len(mask) if i in filtered else mask for i, mask in enumerate(masks)
            ]
        generator_output, uids = super().postprocess_generator_output(generator_output, uids, *args, **kwargs)
        if algorithm.zero_variance_filter:
            self.all_metrics["reward/num_zero_variance_filtered"] = len({uids[i] for i in filtered})
        return generator_output, uids

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        """SkyRL's step, which shows the estimator no sample without a trainable token."""
        response_mask, living = data["response_mask"], data["loss_mask"].any(dim=-1, keepdim=True)
        if living.any():  # with none the means that SkyRL logs would be over nothing
            data["response_mask"] = response_mask * living
        data = super().compute_advantages_and_returns(data)
        data["response_mask"] = response_mask
        for name in ("advantages", "returns"):
            data[name] = data[name] * living
        return data

    def handle_dynamic_sampling(
        self, generator_output: GeneratorOutput, uids: list[str]
    ) -> tuple[GeneratorOutput, list[str], bool]:
        """SkyRL's step, to which a lost episode is as good as its group: it makes none look mixed."""
        rewards, masks = generator_output["rewards"], generator_output["loss_masks"]
        returns = [sum(reward) for reward in rewards]
        for i, mask in enumerate(masks):
            if any(mask):
                continue
            alike = [returns[j] for j, uid in enumerate(uids) if uid == uids[i] and any(masks[j])]
            if alike:
                rewards[i] = [*[0.0] * (len(rewards[i]) - 1), alike[0]]
        generator_output, uids, keep = super().handle_dynamic_sampling(generator_output, uids)
        return generator_output, uids, keep

    async def train(self) -> None:
        try:
            await super().train()
        finally:
            # Here and not later: the client's connections belong to this event loop.
            await self.inference_engine_client.teardown()
