# The server on CPUs, without a model other than the embedded one: models are downloaded when a container first needs
# them. docs/serving.md says how to build and run it.
FROM python:3.11-slim-bookworm

# Read by pip: the index of PyTorch's CPU wheels; the default ones for x86 hold CUDA.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

WORKDIR /app
# A layer of its own: torch stays when the project's files change.
RUN pip install --index-url "$TORCH_INDEX_URL" "torch>=2.6" torchvision
COPY pyproject.toml README.md LICENSE ./
COPY models ./models
COPY nanovlm ./nanovlm
# The C compiler builds the CPU kernels, and is not needed afterwards.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && pip install ".[serve,heic,structured]" \
    && apt-get purge --yes --auto-remove gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# The folder is made here so that a volume mounted on it belongs to the user.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin nanovlm \
    && install --directory --owner=10001 --group=10001 /home/nanovlm/.cache/huggingface
USER nanovlm
WORKDIR /home/nanovlm
ENV HF_HOME=/home/nanovlm/.cache/huggingface

EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# Other machines reach the server only with a key: set NANOVLM_API_KEY.
ENTRYPOINT ["nanovlm"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
