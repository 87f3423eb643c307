# Zooforge on NVIDIA GPUs. From the repository's root:
#
#   docker build -f docker/nvidia.Dockerfile -t zooforge .
#   docker run --rm --gpus all --ipc=host -v $PWD/outputs:/zooforge/outputs zooforge python -m zoo.qwen3 precision=bf16
#
# The torch of the lock brings its own CUDA libraries; the host gives the driver, and Triton needs a C compiler.
FROM python:3.12-slim

RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ git && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir uv

WORKDIR /zooforge
ENV UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never PATH=/zooforge/.venv/bin:$PATH

# What others need is installed before the source is copied, so that a changed line does not install it again.
COPY pyproject.toml uv.lock README.md LICENSE .python-version ./
RUN uv sync --frozen --no-install-project --no-dev --extra nvidia --extra formats --extra tensorboard

COPY . .
RUN uv sync --frozen --no-dev --extra nvidia --extra formats --extra tensorboard
CMD ["zoo", "doctor"]
