"""Trained runs as files that other programs read: safetensors, ONNX, torch.export and timm."""

FORMATS = ("safetensors", "onnx", "torch-export", "timm")
OUTPUTS = ("probabilities", "logits")
"""What an ONNX or torch.export file computes."""
