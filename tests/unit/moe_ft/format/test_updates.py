"""Updates as they are sent."""

import math

import pytest

from moe_ft.errors import CorruptStateError
from moe_ft.format.updates import AdamStep, GradientSlice, Update, decode_update, encode_update

STEP = AdamStep(
    lr=math.pi * 1e-4,
    beta1=0.9,
    beta2=1 - 2**-40,
    eps=1e-8,
    weight_decay=0.1,
    is_decoupled=True,
    number=7.0,
    dtype="BF16",
    factors=(2.0**-17, 1 / 3),
)
UPDATE = Update(
    base_iteration=6,
    steps=(STEP,),
    slices=(GradientSlice("a", 0, 5, 0), GradientSlice("b", 2, 9, 0)),
)


def test_update_comes_back_with_every_bit_of_its_numbers() -> None:
    assert decode_update(encode_update(UPDATE)) == UPDATE
    assert UPDATE.num_bytes == 2 * 12


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        encode_update(UPDATE).replace(b'"BF16"', b'"U8"'),
        encode_update(UPDATE).replace(b'"number":7.0', b'"number":0.0'),
        encode_update(UPDATE).replace(b'["b",2,9,0]', b'["b",2,9,1]'),
        encode_update(UPDATE).replace(b'["b",2,9,0]', b'["b",9,2,0]'),
        encode_update(UPDATE).replace(b'"lr":', b'"more":1,"lr":'),
    ],
)
def test_update_of_another_form_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptStateError):
        decode_update(content)
