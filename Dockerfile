# GPU image. The versions stand in docs/versions.md, and tests/unit/test_versions.py compares the two.
FROM nvcr.io/nvidia/pytorch:25.11-py3

# The NGC image pins what it ships; megatron-core and our own requirements must be resolvable beside it.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1

# Fused Adam, multi-tensor kernels and fused gradient accumulation.
ARG APEX_COMMIT=10417ace
RUN NVCC_APPEND_FLAGS="--threads 4" pip install --no-build-isolation --no-deps \
      --config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" \
      "git+https://github.com/NVIDIA/apex@${APEX_COMMIT}"

# Transformer Engine comes with the image; stop here if it does not.
RUN python -c "import transformer_engine.pytorch"

WORKDIR /opt/megamem
COPY setup.py pyproject.toml requirements.txt ./
COPY megamem megamem
COPY launch launch
COPY examples examples
# torch is the image's own.
RUN pip install "megatron-core==0.16.1" && pip install -r requirements.txt && pip install --no-deps -e .

ENTRYPOINT ["/bin/bash"]
