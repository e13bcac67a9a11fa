# docker build -t preheat .
# docker run --rm -v "$PWD:/home/preheat/here" preheat plan recipe.yaml
FROM python:3.11-slim

# Debian's releases differ by security fixes, so their versions are not pinned.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ git make \
 && rm -rf /var/lib/apt/lists/*

# Optional dependencies (pyproject.toml): --build-arg EXTRAS=[onnx,torchao]
ARG EXTRAS=
# Where pip finds torch decides whether it is the CPU or a CUDA build: --build-arg PIP_EXTRA_INDEX_URL=…
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /source
COPY requirements.lock requirements-dev.lock ./
RUN pip install --no-cache-dir --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY preheat preheat
RUN pip install --no-cache-dir --no-build-isolation --constraint requirements.lock --constraint requirements-dev.lock ".$EXTRAS"

# The folders belong to the user before a volume is mounted there, so that a new volume does too.
RUN useradd --create-home --uid 1000 preheat \
 && install --directory --owner preheat --group preheat /home/preheat/.cache /home/preheat/here
USER 1000
WORKDIR /home/preheat/here
ENTRYPOINT ["preheat"]
CMD ["--help"]
