# `vacsr serve` on a CPU. Build: docker build -t vacsr . — run: docs/how-to/serve.md, or docker compose up.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# --build-arg EXTRAS=clip,serve,qdrant for an index in Qdrant
ARG EXTRAS=clip,serve
# The usual torch brings several GB of CUDA; --build-arg TORCH_INDEX=ADDRESS of PyTorch's CPU builds makes a small image
ARG TORCH_INDEX=
RUN python -m venv /opt/vacsr \
    && PIP_EXTRA_INDEX_URL=${TORCH_INDEX} /opt/vacsr/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.12-slim
RUN useradd --uid 10001 --no-create-home vacsr
COPY --from=build /opt/vacsr /opt/vacsr
ENV PATH=/opt/vacsr/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/tmp/huggingface MPLCONFIGDIR=/tmp/matplotlib
USER 10001
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=2m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["vacsr"]
# /data/model is a model folder or run, /data/index an exact index
CMD ["serve", "/data/model", "--index", "exact:/data/index", "--host", "0.0.0.0", "--port", "8000"]
