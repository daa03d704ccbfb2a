"""A small tree for each step, and what lies in a storage afterwards."""

import torch

from efficio_ckpt import list_checkpoints, save_state

TREE = {"w": torch.arange(600.0).reshape(2, 300), "b": torch.full((7,), 0.5, dtype=torch.bfloat16), "n": 1}


def tree_of(step):
    return {**TREE, "w": TREE["w"] + step, "n": step}


def save(storage, step, **options):
    return save_state(storage, tree_of(step), step=step, **options)


def steps(storage):
    return [checkpoint.step for checkpoint in list_checkpoints(storage)]


def chain_of(problem):
    """The texts of an error and of all errors behind it, shown or not."""
    if problem is None:
        return ""
    return repr(problem) + chain_of(problem.__cause__) + chain_of(problem.__context__)
