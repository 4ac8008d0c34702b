"""Specs of torchaudio.functional: filters, spectra, losses and beamforming."""

from __future__ import annotations

import torch
import torchaudio.functional as F
from describe import add, alone

from retrograd import tensor as t

WAVE = dict(x=t("B", "L", low=-0.4, high=0.4))
SIZES = dict(B=(1, 5), L=(20, 60))
A, B = [1.0, -0.3, 0.2], [0.5, 0.2, 0.1]


def iir(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The difference equation, sample by sample."""
    out: list[torch.Tensor] = []
    for n in range(x.shape[-1]):
        value = sum(b[k] * x[..., n - k] for k in range(len(b)) if n >= k)
        value = value - sum(a[k] * out[n - k] for k in range(1, len(a)) if n >= k)
        out.append(value / a[0])
    return torch.stack(out, -1)


def coefficients(values: list[float], d: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=d.dtype) + d


SHIFT = t(3, low=-0.1, high=0.1)
add("torchaudio.functional.lfilter", lambda x, a, b: F.lfilter(x, coefficients(A, a), coefficients(B, b), clamp=False),
    lambda x, a, b: iir(x, coefficients(A, a), coefficients(B, b)), dict(**WAVE, a=SHIFT, b=SHIFT), sizes=SIZES)  # fmt: skip
alone("torchaudio.functional.filtfilt", lambda x, a, b: F.filtfilt(x, coefficients(A, a), coefficients(B, b), clamp=False),
      dict(**WAVE, a=SHIFT, b=SHIFT), sizes=SIZES)  # fmt: skip
for name, fn in (
    ("highpass_biquad", lambda x: F.highpass_biquad(x, 100, 20.0)),
    ("lowpass_biquad", lambda x: F.lowpass_biquad(x, 100, 20.0)),
    ("bandpass_biquad", lambda x: F.bandpass_biquad(x, 100, 20.0)),
    ("bandreject_biquad", lambda x: F.bandreject_biquad(x, 100, 20.0)),
    ("allpass_biquad", lambda x: F.allpass_biquad(x, 100, 20.0)),
    ("equalizer_biquad", lambda x: F.equalizer_biquad(x, 100, 20.0, 3.0)),
    ("bass_biquad", lambda x: F.bass_biquad(x, 100, 3.0, 10.0)),
    ("treble_biquad", lambda x: F.treble_biquad(x, 100, 3.0, 20.0)),
    ("band_biquad", lambda x: F.band_biquad(x, 100, 20.0)),
    ("deemphasis", F.deemphasis), ("preemphasis", F.preemphasis),
    ("overdrive", F.overdrive), ("contrast", F.contrast), ("dcshift", lambda x: F.dcshift(x, 0.1)),
    ("gain", lambda x: F.gain(x, 3.0)), ("compute_deltas", lambda x: F.compute_deltas(x[:, None])),
    ("resample", lambda x: F.resample(x, 3, 2)), ("resample.kaiser", lambda x: F.resample(x, 2, 3, resampling_method="sinc_interp_kaiser")),
    ("spectrogram", lambda x: F.spectrogram(x, 0, torch.hann_window(8, dtype=x.dtype), 8, 4, 8, 2.0, False)),
    ("spectrogram.magnitude", lambda x: F.spectrogram(x, 2, torch.hann_window(8, dtype=x.dtype), 8, 4, 8, 1.0, "window")),
    ("spectrogram.complex", lambda x: F.spectrogram(x, 0, torch.hann_window(8, dtype=x.dtype), 8, 4, 8, None, False)),
    ("spectral_centroid", lambda x: F.spectral_centroid(x, 100, 0, torch.hann_window(8, dtype=x.dtype), 8, 4, 8)),
    ("sliding_window_cmn", lambda x: F.sliding_window_cmn(x[None], 5, 2)),
    ("phaser", lambda x: F.phaser(x, 1000)), ("flanger", lambda x: F.flanger(x[:, None], 1000)),
):  # fmt: skip
    alone(f"torchaudio.functional.{name}", fn, WAVE, sizes=SIZES)
alone("torchaudio.functional.loudness", lambda x: F.loudness(x, 100), dict(x=t(2, 2, 120, low=-0.4, high=0.4)))
alone("torchaudio.functional.amplitude_to_DB", lambda x: F.amplitude_to_DB(x, 10.0, 1e-10, 0.0, 60.0), dict(x=t("B", "M", "N", low=0.1, high=4.0)),
      sizes=dict(B=(1, 4), M=(1, 9), N=(1, 9)))  # fmt: skip
alone("torchaudio.functional.DB_to_amplitude", lambda x: F.DB_to_amplitude(x, 1.0, 0.5), dict(x=t("M", "N")))
PAIR = dict(x=t("B", "L"), y=t("B", "K"))
PAIRED = dict(B=(1, 4), L=(1, 40), K=(1, 12))
for name in ("convolve", "fftconvolve"):
    # Another algorithm than that of sums: every element has the errors of the largest (13 times measured).
    options = dict(algorithm_error=32.0) if name == "fftconvolve" else {}
    add(f"torchaudio.functional.{name}", lambda x, y, name=name: getattr(F, name)(x, y),
        lambda x, y: torch.stack([sum((x[:, i] * y[:, n - i] for i in range(max(0, n - y.shape[1] + 1), min(n + 1, x.shape[1]))),
                                      x.new_zeros(x.shape[0])) for n in range(x.shape[1] + y.shape[1] - 1)], 1),
        PAIR, sizes=PAIRED, **options)  # fmt: skip
add("torchaudio.functional.add_noise", F.add_noise,
    lambda x, y, s: x + y * (x.square().sum(-1) / y.square().sum(-1) / 10 ** (s / 10)).sqrt()[:, None],
    dict(x=t("B", "L"), y=t("B", "L"), s=t("B", scale=5.0)), sizes=dict(B=(1, 5), L=(2, 60)))  # fmt: skip
SPECTRUM = dict(x=t("B", 2, 5, "T", dtype="complex"))
alone("torchaudio.functional.phase_vocoder",
      lambda x: F.phase_vocoder(x, 1.3, torch.linspace(0, 9, 5, dtype=x.real.dtype)[:, None]), SPECTRUM,
      sizes=dict(B=(1, 3), T=(3, 9)))  # fmt: skip
alone("torchaudio.functional.inverse_spectrogram",
      lambda x: F.inverse_spectrogram(x, None, 0, torch.hann_window(8, dtype=x.real.dtype), 8, 4, 8, False), SPECTRUM,
      sizes=dict(B=(1, 3), T=(3, 9)))  # fmt: skip
alone("torchaudio.functional.psd", F.psd, SPECTRUM, sizes=dict(B=(1, 3), T=(3, 9)))
alone("torchaudio.functional.mvdr_weights_souden",
      lambda x, y: F.mvdr_weights_souden(F.psd(x), F.psd(y), 0), dict(x=t(2, 2, 5, 9, dtype="complex"), y=t(2, 2, 5, 9, dtype="complex")))  # fmt: skip
alone("torchaudio.functional.frechet_distance",
      lambda a, x, b, y: F.frechet_distance(a, x @ x.mT + torch.eye(4, dtype=x.dtype), b, y @ y.mT + torch.eye(4, dtype=x.dtype)),
      dict(a=t(4), x=t(4, 4), b=t(4), y=t(4, 4)))  # fmt: skip


def transducer(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The transducer loss of [B, T, U + 1, V] by its recursion, blank last."""
    logp = x.log_softmax(-1)
    losses = []
    for one_logp, labels in zip(logp, targets, strict=True):
        steps, width, _ = one_logp.shape
        alpha: dict[tuple[int, int], torch.Tensor] = {(0, 0): one_logp.new_zeros(())}
        for i in range(steps):
            for u in range(width):
                ways = [alpha[i - 1, u] + one_logp[i - 1, u, -1]] if i else []
                ways += [alpha[i, u - 1] + one_logp[i, u - 1, labels[u - 1]]] if u else []
                if ways:
                    alpha[i, u] = torch.stack(ways).logsumexp(0)
        losses.append(-(alpha[steps - 1, width - 1] + one_logp[-1, -1, -1]))
    return torch.stack(losses)


add("torchaudio.functional.rnnt_loss",
    lambda x, y: F.rnnt_loss(x, y.int(), torch.full((2,), 3, dtype=torch.int32), torch.full((2,), 2, dtype=torch.int32), reduction="none"),
    transducer, dict(x=t(2, 3, 3, 5), y=t(2, 2, dtype="int64", high=4)))  # fmt: skip
