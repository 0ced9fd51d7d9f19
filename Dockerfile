# This image was never built or run.
#   docker build -t linnaeus . && docker run --rm --gpus all linnaeus      (without a GPU, omit --gpus all)
FROM python:3.12-slim
WORKDIR /linnaeus
COPY pyproject.toml README.md LICENSE ./
COPY linnaeus linnaeus
COPY configs configs
RUN pip install --no-cache-dir '.[train]'
CMD ["linnaeus", "train", "--cfg", "configs/digits.yaml"]
