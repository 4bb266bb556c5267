# The package with its optional parts for training, serving and the page; a CUDA runtime comes with torch's wheels.
# Checked line by line, never built: see docs/machines.md. docker build -t postgrad . && docker run --gpus all -v $PWD:/work postgrad train grpo ...
# The code sandbox needs user namespaces inside the container: docker run --security-opt seccomp=unconfined ...
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[cluster,lora,track]"
WORKDIR /work
ENTRYPOINT ["postgrad"]
CMD ["doctor"]
