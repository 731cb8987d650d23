"""This rank's part of the weights of a directory, read without the other ranks."""

from funrl import trees
from funrl.models.huggingface import directories as hf


def own_part(folder, model, dtype, layouts, rank):
    """The weights of a directory in the boxes of a rank."""
    read = hf.weight_reader(folder, model, dtype)
    return trees.map_named(lambda name, _, layout: read(name, layout.box(rank)), model.shapes, layouts)
