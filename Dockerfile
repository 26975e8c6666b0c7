# fivefold with all that it needs, for GPUs or a CPU, as a user who is not root.
#
#   docker build -t fivefold .                              torch's usual build for Linux, which has CUDA
#   docker build -t fivefold:cpu --build-arg VARIANT=cpu .  the small one without
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" fivefold train notes.yaml
ARG PYTHON=3.12.11
FROM python:${PYTHON}-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# A C compiler for kernels of torch.compile and of fivefold; what NCCL sends through InfiniBand and EFA with.
# Versions are not named: Debian takes old ones away, and a build would fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fivefold
COPY constraints.txt ./

# First what is large and seldom changes. The versions are those of constraints.txt, which are tested.
ARG VARIANT=cuda
RUN case "$VARIANT" in \
        cuda) index=https://pypi.org/simple ;; \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        *) echo "VARIANT is cuda or cpu, not $VARIANT" >&2; exit 2 ;; \
    esac \
    && pip install --index-url "$index" --constraint constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY docs ./docs
COPY src ./src
# For workers of Ray: --build-arg EXTRAS=hub,parquet,s3,tensorboard,ray
ARG EXTRAS=hub,parquet,s3,tensorboard
RUN pip install --constraint constraints.txt ".[$EXTRAS]"

# Kubernetes knows by the number that this is not root. SkyPilot needs root: --build-arg RUN_AS=0
RUN useradd --uid 1000 --create-home fivefold && install --directory --owner 1000 --group 1000 /work
ARG RUN_AS=1000
USER ${RUN_AS}
WORKDIR /work

ENTRYPOINT ["fivefold"]
CMD ["doctor"]
