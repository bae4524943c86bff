# An image for machines with NVIDIA GPUs. It has not been built, nor run, by those who wrote it: see docs/gpus.md.
#
#   docker build -t megatron-anywhere .
#   docker run --gpus all --ipc host -v "$PWD/data:/workspace/data" megatron-anywhere \
#       bash examples/pretrain_gpt_distributed.sh
#
# torch brings CUDA's libraries with it; of the machine it needs the driver and NVIDIA's container toolkit.
FROM python:3.12-slim

WORKDIR /workspace
ENV PYTHONUNBUFFERED=1

# What is installed changes less often than the code: a layer of its own.
COPY setup.py constraints.txt pyproject.toml README.md LICENSE ./
COPY megatron megatron
RUN pip install --no-cache-dir -c constraints.txt -e .[test,watch]
COPY . .

# Runs as a user of its own, who may write below /workspace; a mounted folder must let the user with this number write.
RUN useradd --uid 1000 --create-home trainer
RUN chown -R trainer /workspace
USER trainer

CMD ["python", "-m", "megatron.report"]
