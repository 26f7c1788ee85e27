# SPDX-License-Identifier: Apache-2.0
"""Numbers that 32 bits can't hold are refused, whatever form the data has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ipufit import CachedDataset, DataError, IPUModel
from tests import reference

LARGE = 1_700_000_000_123
AT = 11
ROWS = 16


def ids(value=LARGE, at=AT):
    numbers = torch.arange(ROWS)
    numbers[at] = value
    return numbers.reshape(ROWS, 1)


class Numbers(reference.Recorded):
    def __getitem__(self, index):
        return tuple(tensor[index].item() for tensor in self.tensors)


FORMS = {
    "tensors": lambda *parts: parts,
    "arrays": lambda *parts: tuple(part.numpy() for part in parts),
    "tensor dataset": lambda *parts: (TensorDataset(*parts),),
    "cached": lambda *parts: (CachedDataset(reference.Recorded(*parts)),),
    "dataset": lambda *parts: (reference.Recorded(*parts),),
    "numbers": lambda *parts: (Numbers(*parts),),
    "stream": lambda *parts: (reference.Stream(list(zip(*parts))),),
    "loader": lambda *parts: (DataLoader(TensorDataset(*parts), batch_size=4),),
    "generator": lambda *parts: (zip(*(part.split(3) for part in parts)),),
}


class Widened(torch.nn.Module):
    """Takes integers, and has something to train."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x.reshape(-1, 1).to(torch.float32))


def compiled(**settings):
    return reference.compiled(Widened(), device_iterations=2, **settings, loss="mse")


@pytest.mark.parametrize(
    ("form", "part", "method"),
    [
        *((form, part, "fit") for form in FORMS for part in ("inputs", "targets")),
        *((form, "inputs", "predict") for form in FORMS),
        *(("dataset", part, "evaluate") for part in ("inputs", "targets")),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(form, part, method):
    parts = (ids(), ids(0)) if part == "inputs" else (ids(0), ids(2**32 + 1))
    data, sizes = FORMS[form](*parts), {"batch_size": 4}
    if method == "predict":
        data, sizes = data[:1], {}
    with pytest.raises(DataError, match=f"Sample {AT} of `x` has .* in its {part}: "):
        getattr(compiled(), method)(*data, verbose=0, **sizes)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_shuffled_sample_is_named_by_its_index(mode):
    model = compiled(loader_mode=mode)
    match = f"Sample {AT} of `x` has {LARGE} in its inputs: .* take -807049093 for it"
    with pytest.raises(DataError, match=match):
        model.fit(reference.Recorded(ids(), ids(0)), batch_size=4, epochs=2, verbose=0)


def test_validation_data_is_named():
    data = reference.Recorded(ids(0), ids(0))
    with pytest.raises(DataError, match=f"Sample {AT} of `validation_data` has"):
        compiled().fit(
            data,
            validation_data=reference.Recorded(ids(0), ids()),
            batch_size=4,
            verbose=0,
        )


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
def test_single_batches_are_checked(method):
    with pytest.raises(DataError, match=f"Sample {AT} of `x` has 4294967296 in its ta"):
        getattr(compiled(), method)(ids(0), ids(2**32))


def test_a_batch_to_predict_is_checked():
    with pytest.raises(DataError, match=f"Sample {AT} of `x` has -2147483649"):
        compiled().predict_on_batch(ids(-(2**31) - 1))


def test_the_input_is_named_by_its_key():
    x = {"a": ids(0), "b": ids()}
    with pytest.raises(DataError, match=r"has \d+ in its inputs\['b'\]: "):
        compiled().predict(x, verbose=0)


@pytest.mark.parametrize("form", FORMS)
def test_floats_that_would_become_infinite_are_refused(form):
    x = torch.zeros(ROWS, 1, dtype=torch.float64)
    x[AT] = -1e300
    y = torch.zeros(ROWS, 1)
    with pytest.raises(DataError, match=r"has -1e\+300.* Scale the values"):
        compiled().fit(*FORMS[form](x, y), batch_size=4, verbose=0)


@pytest.mark.parametrize("value", [-(2**70)])
def test_a_number_beyond_int64_is_refused(value):
    class Huge(reference.Recorded):
        def __getitem__(self, index):
            return value, 0.0

    with pytest.raises(DataError, match=f"has {value}: an IPU has integers of 32"):
        compiled().fit(Huge(ids()), batch_size=4, verbose=0)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint64])
def test_unsigned_types_that_poptorch_lacks_are_refused(dtype):
    with pytest.raises(DataError, match=r"has an? .*uint\d+"):
        compiled().predict(np.ones((4, 1), dtype=dtype), verbose=0)
    if hasattr(torch, dtype.__name__):  # in newer torch
        x = torch.ones(4, 1).to(getattr(torch, dtype.__name__))
        with pytest.raises(DataError, match=r"uint\d+, a type .* Convert it to int64"):
            compiled().predict(x, verbose=0)


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantized tensor|Sparse CSR)")
def test_other_tensors_that_poptorch_lacks_are_refused():
    x = torch.ones(4, 1)
    made = {
        "nested": lambda: torch.nested.nested_tensor(list(x)),
        "dequantize": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "float8.* float32": lambda: x.to(torch.float8_e4m3fn),
        "sparse_csr": lambda: x.to_sparse_csr(),
    }
    if not hasattr(torch, "float8_e4m3fn"):  # in newer torch
        made.pop("float8.* float32")
    for words, make in made.items():
        with pytest.raises(DataError, match=rf"has a tensor of .*{words}"):
            compiled().fit(make(), x, batch_size=4, verbose=0)


class Items(torch.utils.data.Dataset):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.item, 0


def test_values_that_are_no_numbers_say_what_to_give():
    with pytest.raises(DataError, match=r"has a object, .* or NumPy arrays"):
        compiled().fit(Items(object()), batch_size=4, verbose=0)
    with pytest.raises(DataError, match="Encode it as numbers, as a tokenizer"):
        reference.compiled().fit(Items("text"), batch_size=4, verbose=0)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_exactly_what_int32_changes_is_refused(numbers):
    model, x = IPUModel(torch.nn.Identity()), torch.tensor(numbers)
    changed = x.to(torch.int32).ne(x).nonzero()
    if not len(changed):
        assert model.predict(x, verbose=0).tolist() == numbers
        return
    with pytest.raises(DataError, match=f"^Sample {int(changed[0])} of `x` has "):
        model.predict(x, verbose=0)


@given(st.lists(st.floats(width=64), min_size=1, max_size=4))
def test_float64_is_rounded_or_refused(numbers):
    model = IPUModel(torch.nn.Identity())
    wide = torch.tensor(numbers, dtype=torch.float64)
    narrow = wide.to(torch.float32)
    if bool((torch.isinf(narrow) != torch.isinf(wide)).any()):
        with pytest.raises(DataError, match="`x` has "):
            model.predict(wide, verbose=0)
    else:
        outputs = model.predict(wide, verbose=0)
        assert torch.equal(outputs.nan_to_num(7), narrow.nan_to_num(7))
