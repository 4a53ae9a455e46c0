# `kvkeep serve` on a CPU. The first stage compiles, the second has no compiler. See docs/install.md.
# BASE: a Debian image with Python 3.11 or newer and its venv.
ARG BASE=python:3.13-slim

FROM ${BASE} AS builder
RUN apt-get update && apt-get install --yes --no-install-recommends g++
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv && python3 -m venv /opt/kvkeep
# The build of PyTorch, by uv's name: `cpu`, `cu130` and others. Empty: whatever the index has.
ARG TORCH_BACKEND=cpu
WORKDIR /src
COPY constraints.txt ./
# PyTorch is a layer of its own, which a change of kvkeep's sources does not build again.
RUN /opt/uv/bin/uv pip install --python /opt/kvkeep --no-cache --constraints constraints.txt \
    ${TORCH_BACKEND:+--torch-backend=${TORCH_BACKEND}} torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kvkeep kvkeep
# Every instruction set: an image runs on other processors than the one that built it.
RUN KVKEEP_KERNELS_FOR=all /opt/uv/bin/uv pip install --python /opt/kvkeep --no-cache \
    --constraints constraints.txt ${TORCH_BACKEND:+--torch-backend=${TORCH_BACKEND}} '.[server]'

FROM ${BASE}
RUN useradd --uid 10001 --create-home kvkeep && install --directory --owner=kvkeep /data
COPY --from=builder /opt/kvkeep /opt/kvkeep
ENV PATH=/opt/kvkeep/bin:$PATH KVKEEP_HOME=/data
USER kvkeep
VOLUME /data
EXPOSE 8080
# Long enough to fetch the model at the first start. http.client uses no proxy, unlike urllib.
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s \
    CMD ["python", "-c", "from http.client import HTTPConnection as H; c = H('127.0.0.1', 8080, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["kvkeep"]
# A server that others can reach needs API keys: mount a file with a key or its hash a line.
# `docker stop` kills after 10 s: half of them are for running answers, the rest to save sessions.
CMD ["serve", "--host", "0.0.0.0", "--api-key-file", "/run/secrets/keys", "--grace", "5"]
