# moe_ft in a container. It fetches nothing but packages.
#
#   docker build --tag moe_ft .
#   docker build --tag moe_ft --build-arg BASE=IMAGE .          # which has PyTorch: that stays as it is
#   docker build --tag moe_ft --build-arg TORCH_INDEX=URL .     # PyTorch for CPUs: docs/install.md
#
# Megatron-LM comes with an IMAGE that has PyTorch, or is mounted, and PYTHONPATH names it. Otherwise the
# image has the wheel of megatron-core. The scripts are in /opt/moe_ft.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE pretrain_gpt_moe.py ./
COPY moe_ft moe_ft
COPY megatron megatron
COPY examples examples
COPY tools tools
RUN python3 -m pip wheel --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG TORCH_INDEX
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN if python3 -c 'import torch'; then \
        python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
        && python3 -m moe_ft.installation | sed 's/.*/^&==/' \
            | grep --ignore-case --file - /wheels/constraints.txt > /wheels/missing.txt; \
        python3 -m pip install --no-cache-dir -r /wheels/missing.txt; \
    else \
        python3 -m pip install --no-cache-dir -c /wheels/constraints.txt \
            ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheels/*.whl; \
    fi
RUN python3 -m moe_ft examples --copy /opt/moe_ft
RUN useradd --create-home --uid 10001 moe_ft
USER 10001:10001
WORKDIR /opt/moe_ft
ENTRYPOINT ["python3", "-m", "moe_ft"]
CMD ["--version"]
