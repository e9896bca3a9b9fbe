"""Test images are distributed over processes, for any number of images and processes."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from dcls_convert.tuning.training import Training


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 5))
def test_processes_test_equally_many_images_and_all_of_them(images, processes, batch_size):
    keys_by_process = []
    for process in range(processes):
        training = SimpleNamespace(
            data=SimpleNamespace(test=range(images)),
            accelerator=SimpleNamespace(process_index=process, num_processes=processes),
            recipe=SimpleNamespace(batch_size=batch_size),
        )
        batches = Training._test_keys(training)
        assert all(len(batch) <= batch_size for batch in batches)
        keys_by_process.append([index for batch in batches for _, index in batch])
    assert len({len(keys) for keys in keys_by_process}) == 1
    # `test` interleaves the results in this order, and removes the padding.
    interleaved = [index for keys in zip(*keys_by_process, strict=True) for index in keys]
    assert interleaved[:images] == list(range(images))
