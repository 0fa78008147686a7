"""Everything that differs on a machine without CUDA.

The rehearsal runs the same trainer, workers and engine as a cluster does. SkyRL names CUDA in a few
places, though; here those names are given CPU meanings, in a process that sees no CUDA device only.
With CUDA present `install` does nothing.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

# CPUs that Ray counts, however few there are: SkyRL's placement groups ask for one a rank and engine.
_CPUS_FOR_PLACEMENT = 16
_CPUS_OF_HEAD = 2
_OBJECT_STORE_BYTES = 250_000_000  # on each node
# The tiny model's cache takes 1 kB a token: room for 64 episodes of 4,000 tokens.
KV_CACHE_BYTES = 256 * 2**20

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment() -> None:
    """Set what Ray and vLLM read from the environment, before either starts; settings that are there win."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start_nodes(gpus: int) -> Any:
    """Two Ray nodes on this machine, as in a cluster: a head without GPUs, and one that has them all.

    They belong to this process, end with it, and are what `ray.init` connects to, never a cluster that
    happens to be named.

    Args:
        gpus: logical GPUs that the run's placement groups will ask for.

    Returns:
        A handle with a method `shutdown`.
    """
    from ray.cluster_utils import Cluster

    # Of the cluster that took this job: the others know nothing of its working directory.
    os.environ.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
    common: dict[str, Any] = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
    head = {"num_cpus": _CPUS_OF_HEAD, "num_gpus": 0, **common}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    cluster.add_node(num_cpus=_CPUS_FOR_PLACEMENT, num_gpus=gpus, **common)
    return cluster


def forward_environment() -> None:
    """Give the workers of nodes that others started what `prepare_environment` has set here."""
    from skyrl.train.utils import utils

    prepare = utils.prepare_runtime_environment
    set_here = {name: os.environ[name] for name in _ENVIRONMENT}
    utils.prepare_runtime_environment = lambda cfg: {**prepare(cfg), **set_here}


def configure(cfg: Any) -> None:
    """Point a built SkyRL config at vLLM's CPU worker, in place, and this driver at no GPU.

    Applied after the config is built, because SkyRL turns `enforce_eager` off again for LoRA while
    building it, and the CPU engine has no graphs to capture.
    """
    engine = cfg.generator.inference_engine
    engine.enforce_eager = True
    engine.distributed_executor_backend = "mp"
    engine.engine_init_kwargs.setdefault("worker_cls", "vllm.v1.worker.cpu_worker.CPUWorker")
    engine.engine_init_kwargs.setdefault("kv_cache_memory_bytes", KV_CACHE_BYTES)

    from skyrl.train.utils import utils

    # SkyRL would start a Ray instance to ask two GPUs whether they reach each other.
    utils.peer_access_supported = lambda max_num_gpus_per_node: False


def install() -> None:
    """Give SkyRL's CUDA calls CPU meanings in this process; does nothing where CUDA is present."""
    import torch

    if torch.cuda.is_available():
        return
    _patch_torch(torch)
    _patch_skyrl()


def _patch_torch(torch: Any) -> None:
    for name in ("synchronize", "set_device", "empty_cache", "manual_seed_all"):
        # One function each: torch._dynamo looks rules up by function and refuses one with two names.
        setattr(torch.cuda, name, lambda *_args, **_kwargs: None)
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self

    distributed = torch.distributed
    distributed.init_process_group = _with_first("gloo", distributed.init_process_group, "backend")
    distributed.device_mesh.init_device_mesh = _with_first(
        "cpu", distributed.device_mesh.init_device_mesh, "device_type"
    )


def _with_first(value: str, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` with `value` for its first argument `name`, whatever the caller gives for it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(name, None)
        return function(value, *args[1:], **kwargs)

    return call


def _patch_skyrl() -> None:
    import torch
    from skyrl.backends.skyrl_train.distributed import fsdp_utils
    from skyrl.backends.skyrl_train.workers.worker import DistributedTorchRayActor

    def broadcast_buffers(model: Any, _loaded: dict[str, Any]) -> None:
        for module in model.modules():
            for key in sorted(getattr(module, "_non_persistent_buffers_set", set())):
                buffer = module._buffers.get(key)
                if buffer is None:
                    continue
                if torch.distributed.get_rank() != 0:
                    buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
                torch.distributed.broadcast(buffer, src=0)
                module._buffers[key] = buffer

    fsdp_utils.init_device_mesh = torch.distributed.device_mesh.init_device_mesh
    fsdp_utils._sync_non_persistent_buffers = broadcast_buffers
    DistributedTorchRayActor._set_numa_affinity = lambda self, rank: None
