# syntax=docker/dockerfile:1.7
# The image that serves: Ray Serve LLM and the vLLM that its Ray pins, which is another one than the trainer's. In
# the checkout:
#
#   docker build --file hyperpod/serving.Dockerfile --tag skyrl-maze-serve:0.1.0 .
#
# Base and compilers as in Dockerfile. No EFA: an engine stays on one node.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# wget: KubeRay's probes of a Serve pod. bash, util-linux and procps are in the base.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ gcc libnuma1 python3.12-dev python3.12-venv wget \
    && rm -rf /var/lib/apt/lists/*

# One environment, first on PATH: KubeRay starts `ray` through a shell that reads no profile.
# void: a head without a GPU must not ask the NVIDIA runtime for one; where a pod has GPUs the device plugin says
# which.
ENV PATH=/opt/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=void \
    CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1 \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
RUN --mount=type=bind,source=requirements/serving.txt,target=/tmp/serving.txt \
    --mount=type=cache,target=/root/.cache/pip \
    python3.12 -m venv /opt/venv \
    && pip install --disable-pip-version-check --no-deps --require-hashes --requirement /tmp/serving.txt \
    && userdel --remove ubuntu \
    && useradd --uid 1000 --user-group --create-home --shell /bin/bash maze

USER 1000:1000
WORKDIR /home/maze
# KubeRay gives the command. By hand: what is in it.
CMD ["python", "-c", "import ray, vllm; print(ray.__version__, vllm.__version__)"]
