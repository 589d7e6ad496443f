# The labs and the package on CPUs:
#
#   docker build -f docker/cpu.Dockerfile -t minimegatron .
#   docker run --rm -it --network host -v minimegatron-work:/minimegatron/my-labs minimegatron
#
# JupyterLab listens on 127.0.0.1 alone, so the container shares the host's network. To grade: see docs/instructors.md for
# what a container must allow. PIP_EXTRA_INDEX_URL may name an index with CPU builds of torch, which are smaller.
FROM python:3.11-slim-bookworm

# g++ compiles the kernels for CPUs when they are first used
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash learner \
    && install -d -o learner /minimegatron /minimegatron/my-labs

USER learner
WORKDIR /minimegatron
COPY --chown=learner . .
ARG PIP_EXTRA_INDEX_URL=
RUN make .venv/.lab
ENV PATH=/minimegatron/.venv/bin:$PATH
CMD ["make", "lab"]
