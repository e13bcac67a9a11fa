# docker build -t preheat .
# docker run --rm -v "$PWD:/home/preheat/here" preheat plan recipe.yaml
FROM python:3.11-slim

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

RUN useradd --create-home preheat
USER preheat
WORKDIR /home/preheat/here
ENTRYPOINT ["preheat"]
CMD ["--help"]
