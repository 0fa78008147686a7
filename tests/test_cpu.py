"""On a machine without CUDA SkyRL's CUDA calls work; on one with it nothing changes."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from skyrl_maze import cpu


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_WITHOUT_CUDA = """
from skyrl_maze import _compat, cpu
_compat.install(); cpu.install()
import torch
tensor = torch.ones(2)
assert tensor.cuda() is tensor
torch.cuda.synchronize(); torch.cuda.set_device(3); torch.cuda.empty_cache()
assert torch.ones(1, device=torch.cuda.current_device()).device.type == "cpu"
from skyrl.backends.skyrl_train.workers.worker import DistributedTorchRayActor
DistributedTorchRayActor._set_numa_affinity(None, 0)
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("cpu:gloo,cuda:nccl", "tcp://127.0.0.1:0", rank=0, world_size=1)
from skyrl.backends.skyrl_train.distributed.fsdp_utils import create_device_mesh
print(torch.distributed.get_backend(), create_device_mesh(1, -1).device_type)
"""

_WITH_CUDA = """
import torch
torch.cuda.is_available = lambda: True
before = torch.cuda.synchronize, torch.Tensor.cuda, torch.distributed.init_process_group
from skyrl_maze import cpu
cpu.install()
print(before == (torch.cuda.synchronize, torch.Tensor.cuda, torch.distributed.init_process_group))
"""


@pytest.mark.slow
def test_skyrl_gets_gloo_and_a_cpu_mesh_where_it_asks_for_cuda() -> None:
    assert _python(_WITHOUT_CUDA).split() == ["gloo", "cpu"]


@pytest.mark.slow
def test_inert_where_cuda_is_present() -> None:
    assert _python(_WITH_CUDA).split() == ["True"]


def test_settings_of_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    cpu.prepare_environment()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["HF_HUB_OFFLINE"] == "1"


_NODES = """
import os, ray
from skyrl_maze import cpu
os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"  # a cluster that is none of its business
os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = '{"runtime_env": {"working_dir": "gcs://of_that_cluster.zip"}}'
nodes = cpu.start_nodes(3)
ray.init(log_to_driver=False)
found = {}
for node in ray.nodes():
    head = "node:__internal_head__" in node["Resources"]
    found["head" if head else "other"] = node["Resources"].get("GPU", 0)
environment = dict(ray.get_runtime_context().runtime_env)
ray.shutdown()
nodes.shutdown()
print(sorted(found.items()), environment)
"""


@pytest.mark.slow
def test_the_gpus_are_on_another_node_than_the_head() -> None:
    assert _python(_NODES).strip() == "[('head', 0), ('other', 3.0)] {}"


@pytest.mark.slow
def test_the_engine_is_pointed_at_the_cpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.train.utils import utils

    monkeypatch.setattr(utils, "peer_access_supported", utils.peer_access_supported)
    engine = SimpleNamespace(enforce_eager=False, distributed_executor_backend="ray", engine_init_kwargs={})
    cpu.configure(SimpleNamespace(generator=SimpleNamespace(inference_engine=engine)))
    assert engine.enforce_eager
    assert engine.distributed_executor_backend == "mp"
    assert engine.engine_init_kwargs["worker_cls"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert engine.engine_init_kwargs["kv_cache_memory_bytes"] == 256 * 2**20
    assert utils.peer_access_supported(max_num_gpus_per_node=2) is False


@pytest.mark.slow
def test_workers_of_other_nodes_get_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl.train.utils import utils

    monkeypatch.setattr(
        utils, "prepare_runtime_environment", lambda cfg: {"OF": "SkyRL", "HF_HUB_OFFLINE": ""}
    )
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    cpu.prepare_environment()
    cpu.forward_environment()
    given = utils.prepare_runtime_environment(None)
    assert given["OF"] == "SkyRL"
    assert (given["OMP_NUM_THREADS"], given["HF_HUB_OFFLINE"]) == ("7", "1")
    assert given["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
