# jetrl-jax on an NVIDIA GPU (a driver for CUDA 13).  Not built and not run on a GPU yet: tests/unit/test_dockerfile.py checks what a CPU can.
#
#   docker build -t jetrl-jax .
#   docker run --gpus all -v "$PWD/runs:/srv/jetrl/runs" jetrl-jax
#   docker run --gpus all -v "$PWD/runs:/srv/jetrl/runs" jetrl-jax python -m jetrl_jax report runs/qwen3_100m_gpu
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /srv/jetrl

# JAX brings CUDA's libraries as packages.  The list is complete, so that nothing has to be resolved.
COPY .ci/constraints-py312-cuda.txt .ci/
RUN pip install --no-deps -r .ci/constraints-py312-cuda.txt

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY configs configs
COPY jetrl_jax jetrl_jax
COPY pallas_kernels pallas_kernels
COPY bridge bridge
RUN pip install --no-deps --no-build-isolation .

CMD ["python", "-m", "jetrl_jax.train", "--config", "configs/qwen3_100m_gpu.yaml"]
