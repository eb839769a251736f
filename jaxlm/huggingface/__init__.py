"""Import and export of Transformers checkpoints, by one table of names per family."""

from jaxlm.huggingface.card import ModelCard
from jaxlm.huggingface.folder import export_folder, import_folder

__all__ = ["ModelCard", "export_folder", "import_folder"]
