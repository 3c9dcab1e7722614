# lora_fp8 with its page on port 7860. Everything that should stay is in the volume /data.
#
#   docker build -t lora-fp8 .
#   docker run --gpus all -p 127.0.0.1:7860:7860 -v "$PWD/data:/data" -e LORA_FP8_PASSWORD=... lora-fp8
#
# In mainland China: --build-arg PIP_INDEX=https://pypi.tuna.tsinghua.edu.cn/simple --build-arg TORCH=pypi; with compose, the
# same names are environment variables.
# `make container` runs these steps in a clean Debian root, without Docker and without a GPU.
ARG BASE=nvidia/cuda:12.8.1-base-ubuntu24.04
FROM ${BASE}

# gcc and the headers are for Triton, which compiles kernels when a training starts.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates gcc libc6-dev procps python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu's images have a user of id 1000 already.
RUN if id -u ubuntu >/dev/null 2>&1; then userdel --remove ubuntu; fi \
    && useradd --create-home --uid 1000 trainer \
    && install -d -o trainer -g trainer /data

ARG TORCH=cu128
ARG PIP_INDEX=https://pypi.org/simple
COPY . /opt/lora_fp8
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --index-url "${PIP_INDEX}" uv \
    && if [ "${TORCH}" != pypi ]; then backend="--torch-backend ${TORCH}"; fi \
    && /opt/venv/bin/uv pip install --no-cache --python /opt/venv/bin/python --default-index "${PIP_INDEX}" \
        -c /opt/lora_fp8/constraints.txt ${backend:-} "/opt/lora_fp8[ui,video,heic,tagger]"

ENV PATH=/opt/venv/bin:$PATH \
    LORA_FP8_HOME=/data/home \
    HF_HOME=/data/huggingface \
    PYTHONUNBUFFERED=1
USER trainer
WORKDIR /data
VOLUME /data
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/en/login', timeout=8)"
ENTRYPOINT ["tini", "--", "/opt/lora_fp8/scripts/container.sh"]
