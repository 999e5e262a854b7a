"""noise: the kernel's words and exponentials are the reference's."""

import torch
import triton
import triton.language as tl

from midstream.ops.noise import (
    NOISE_SPAN,
    log_exponential,
    log_exponential_ref,
    philox,
    philox_words,
)

QUARTER = NOISE_SPAN.value // 4


def noise_of(num: int, position: int, low: int, high: int) -> torch.Tensor:
    return log_exponential_ref(num, torch.tensor([position]), torch.tensor([[low, high]]))[0]


@triton.jit
def _noise_kernel(word_ptr, noise_ptr, position, seed_low, seed_high, QUARTER: tl.constexpr):
    block = tl.program_id(0) * QUARTER + tl.arange(0, QUARTER)
    words = philox_words(block, position, tl.load(seed_low), tl.load(seed_high))
    place = tl.program_id(0) * QUARTER * 4 + tl.arange(0, QUARTER)
    for word in tl.static_range(4):
        tl.store(word_ptr + place + word * QUARTER, words[word].to(tl.int64))
        tl.store(noise_ptr + place + word * QUARTER, log_exponential(words[word]))


def _run(position: int, low: int, high: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    word = torch.empty(3 * NOISE_SPAN.value, dtype=torch.int64, device=device)
    noise = torch.empty(3 * NOISE_SPAN.value, device=device)
    seeds = [torch.tensor([s], dtype=torch.int32, device=device) for s in (low, high)]
    _noise_kernel[(3,)](word, noise, position, *seeds, QUARTER=QUARTER)
    return word.cpu(), noise.cpu()


def test_words_are_those_of_philox_4x32_10(device):
    for position, low, high in ((0, 0, 0), (123456, -1, 7), (5, 2**31 - 1, -(2**31))):
        word, _ = _run(position, low, high, device)
        want = philox(torch.arange(3 * QUARTER), *torch.tensor([position, low, high]))
        assert torch.equal(
            word.view(3, 4, QUARTER), torch.stack(want).view(4, 3, QUARTER).transpose(0, 1)
        )


def test_noise_of_the_kernel_is_the_reference_noise(device):
    _, noise = _run(9, 3, -4, device)
    want = noise_of(3 * NOISE_SPAN.value, 9, 3, -4)
    torch.testing.assert_close(noise, want, rtol=0, atol=2e-6)


def test_noise_is_exponential():
    """Kolmogorov-Smirnov, 2**18 draws: 1.95 / 512 is exceeded once in a thousand seeds."""
    exponential = noise_of(2**18, 1, 2, 3).exp().sort().values
    empirical = torch.arange(1, 2**18 + 1) / 2**18
    distance = (empirical - (1 - (-exponential).exp())).abs().max()
    assert distance < 1.95 / 512


def test_prefix_of_the_noise_does_not_depend_on_its_length():
    long = noise_of(5000, 1, 2, 3)
    assert torch.equal(noise_of(77, 1, 2, 3), long[:77])
