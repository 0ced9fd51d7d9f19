"""Trained runs as files that other programs read: safetensors, ONNX and torch.export."""

FORMATS = ("safetensors", "onnx", "torch-export")
OUTPUTS = ("probabilities", "logits")
"""Outputs of an ONNX or torch.export file."""
