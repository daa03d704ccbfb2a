"""Copies in one buffer: the values, in an order that a GPU can copy without memory of its own."""

import pytest
import torch

from efficio_ckpt import CheckpointError, background_saver, load_state
from efficio_ckpt._staging import Pool, stage
from efficio_ckpt._tree import flatten

IMAGES = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
LAYOUTS = {
    "contiguous": IMAGES,
    "channels last": IMAGES.to(memory_format=torch.channels_last),
    "transposed": IMAGES.transpose(1, 3),
    "one channel": IMAGES[:, :1].contiguous().to(memory_format=torch.channels_last),
    "empty": IMAGES[:0],
    "scalar": torch.tensor(3.0),
}


@pytest.mark.parametrize("source", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_copy_lies_in_memory_as_its_source_does(source):
    staged = stage(flatten({"before": torch.ones(3), "t": source}), Pool())
    copy = staged.flat.sources[1]
    assert torch.equal(copy, source)
    assert copy.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() or not source.numel()
    if source.numel():
        assert copy.stride() == source.stride()


def test_columns_with_gaps_between_them_are_copied_without_the_gaps():
    staged = stage(flatten({"t": IMAGES[..., ::2]}), Pool())
    assert torch.equal(staged.flat.sources[0], IMAGES[..., ::2])
    assert staged.flat.sources[0].is_contiguous()


def test_a_gpu_without_memory_for_the_copy_fails_the_save_and_not_the_training(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with background_saver(tmp_path) as saver:
        saver.save({"n": torch.ones(2)}, step=1, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", full)
            with pytest.raises(CheckpointError, match=r"could not save step 2 .*out of memory"):
                saver.save({"n": torch.zeros(2)}, step=2)
        assert saver.save({"n": torch.full((2,), 3.0)}, step=3, wait=True)
    assert load_state(tmp_path)["n"].tolist() == [3.0, 3.0]
