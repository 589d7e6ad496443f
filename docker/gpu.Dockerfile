# The same on NVIDIA GPUs, with the image's own torch (docs/gpu.md, Ways to install):
#
#   docker build -f docker/gpu.Dockerfile -t minimegatron-gpu .
#   docker run --rm -it --gpus all --network host --ipc=host --ulimit memlock=-1 minimegatron-gpu
#
# BASE may be any image with torch 2.11 or newer. `make gpu SYSTEM=1` in the container adds Transformer Engine and
# flash-attn where the image has none.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

USER root
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash learner \
    && install -d -o learner /minimegatron /minimegatron/my-labs

USER learner
WORKDIR /minimegatron
COPY --chown=learner . .
RUN make .venv/.lab SYSTEM=1
ENV PATH=/minimegatron/.venv/bin:$PATH
CMD ["make", "lab", "SYSTEM=1"]
