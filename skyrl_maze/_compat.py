"""Workarounds for faults of SkyRL 0.4.0 and what goes with it, each with its report and the day it can go.

`install()` is called before any `skyrl.backends` module is imported, in every process that trains: the
driver, the trainer task and each worker. It is idempotent.
"""

import importlib.machinery
import logging
import os
import re
import sys
import types
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from loguru import logger

from skyrl_maze.pictures import without_base64

if TYPE_CHECKING:
    from loguru import Record

_SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY")
_SHORTEST_SECRET = 6


def _refuse(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError(
        "flash_attn is not installed and trainer.flash_attn is false, yet SkyRL asked it to pack a batch; "
        "set trainer.remove_microbatch_padding=false"
    )


def _stand_in_for_flash_attn() -> None:
    """`model_wrapper` imports `flash_attn.bert_padding` even where flash attention is switched off.

    flash-attn has no wheels on the public index, so the recipes run with PyTorch's own attention
    (`trainer.flash_attn=false`), which never calls these functions.
    No public report was found. Goes when SkyRL makes that import conditional.
    """
    if "flash_attn" in sys.modules or importlib.machinery.PathFinder.find_spec("flash_attn"):
        return
    package = types.ModuleType("flash_attn")
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    padding = types.ModuleType("flash_attn.bert_padding")
    padding.__spec__ = importlib.machinery.ModuleSpec("flash_attn.bert_padding", None)
    padding.pad_input = padding.unpad_input = _refuse  # type: ignore[attr-defined]
    package.bert_padding = padding  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = package
    sys.modules["flash_attn.bert_padding"] = padding


def _finished_sessions_are_not_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not (message.startswith("finish_session") and message.endswith("HTTP 404"))


def _quieten_finish_session() -> None:
    """Every episode ends with a warning, because vllm-router 0.1.14 has no `/finish_session`.

    SkyRL calls it for routing policies that count sessions; the default one, a consistent hash, does not.
    No public report was found. Goes with a vllm-router that SkyRL's own fields fit.
    """
    name = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client"
    logging.getLogger(name).addFilter(_finished_sessions_are_not_news)


def _hide_secrets_and_base64() -> None:
    """SkyRL logs the values of the variables that it hands to Ray, HF_TOKEN among them, and whole pictures.

    No public report was found. Goes when `prepare_runtime_environment` logs names only and
    `pretty_print_example` leaves `data:` addresses out.
    """
    secrets = [
        value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= _SHORTEST_SECRET
    ]

    def redact(record: "Record") -> None:
        for secret in secrets:
            record["message"] = record["message"].replace(secret, "***")
        record["message"] = without_base64(record["message"])

    logger.configure(patcher=redact)


def count_passes_by_success() -> None:
    """With rewards per token, SkyRL calls an episode passed if its last token's reward is positive.

    A shaped last turn turns success into failure and the other way round; the environment's own `success`
    counts instead where it is reported. Episodes that report nothing were lost and take no part.
    Reports: SkyRL issues 271 and 300. Goes when `get_metrics_from_generator_output` asks the environment.
    """
    from skyrl.train import evaluate, trainer
    from skyrl.train.utils import trainer_utils

    original = trainer_utils.get_metrics_from_generator_output
    if original.__name__ == "by_success":
        return

    def by_success(generator_output: Any, uids: list[str]) -> Any:
        reported = [metrics.get("success") for metrics in generator_output.get("env_metrics") or []]
        rows = [i for i, success in enumerate(reported) if success is not None]
        if not rows:
            return original(generator_output, uids)
        rewards = [generator_output["rewards"][i] for i in rows]
        metrics = original({"rewards": rewards}, [uids[i] for i in rows])
        groups = defaultdict(list)
        for i in rows:
            groups[uids[i]].append(reported[i] > 0)
        return {**metrics, "pass_at_n": sum(map(any, groups.values())) / len(groups)}

    for module in (trainer, evaluate, trainer_utils):
        module.get_metrics_from_generator_output = by_success


def average_environment_metrics() -> None:
    """Over several evaluation batches, SkyRL adds up metrics whose name says neither avg, mean, min nor max.

    A solve rate of two batches would be up to 2. The environments' metrics are averaged over the episodes
    that reported them instead. No public report was found.
    Goes when `concatenate_generator_outputs` aggregates the environments' metrics itself.
    """
    from skyrl.train import evaluate

    original = evaluate.concatenate_generator_outputs
    if original.__name__ == "averaged":
        return

    def averaged(generator_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = original(generator_outputs, *args, **kwargs)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        for output in generator_outputs:
            episodes = sum(map(bool, output.get("env_metrics") or []))
            for name, value in (output.get("rollout_metrics") or {}).items():
                if name.startswith("environment/") and isinstance(value, int | float):
                    sums[name][0] += value * episodes
                    sums[name][1] += episodes
        means = {name: total / episodes for name, (total, episodes) in sums.items() if episodes}
        return {**result, "rollout_metrics": {**result["rollout_metrics"], **means}}

    evaluate.concatenate_generator_outputs = averaged


def install() -> None:
    """Put every workaround in place."""
    _stand_in_for_flash_attn()
    _quieten_finish_session()
    _hide_secrets_and_base64()


def let_this_rank_tell() -> None:
    """HyperPod's toolkit 1.0.4 lets LOCAL_RANK 0 alone tell the agent; SkyRL sets it to a GPU's number.

    Where it is called, the rank that tells has been chosen already. No public report was found. Goes when
    the toolkit asks Ray, or takes the rank as an argument.
    """
    from toolkit_for_ray_on_sagemaker_ai.log_monitoring import _client

    _client._get_local_rank = lambda: 0
