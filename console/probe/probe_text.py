"""Shows a probe as lines of plain text."""

from __future__ import annotations

from console.probe.probe_file import MeasuredLink, Probe

CLOCK_OFF_S = 60.0
"""From here on a person has to know: certificates that are new are refused by clocks more than 5 minutes behind."""


def summary(probe: Probe) -> list[str]:
    """One line for each measurement, made or not."""
    devices = probe.accelerators
    what = f"a host of {probe.cores} cores and {probe.memory_GB or 0:.1f} GB"
    if devices is not None:
        what = f"{devices.count} x {devices.kind}, {devices.memory_GB:.1f} GB each"
    lines = [
        f"{probe.name} of site {probe.site}: {what}",
        *_line("matrix", probe.matrix_tflops_bf16, "{:.4g} TFLOP/s each in bfloat16"),
        *_line("memory", probe.memory_GBps, "{:.4g} GB/s each"),
    ]
    if (sums := probe.allreduce) is not None:
        lines.append(
            f"  all-reduce  {sums.bus_GBps:.3g} GB/s each by {sums.backend}, {sums.latency_us:.0f} us at least"
        )
    if (passes := probe.passes) is not None:
        lines.append(
            f"  passes      {passes.forward_tflops:.4g} TFLOP/s each forward, {passes.forward_backward_tflops:.4g} "
            f"forward and backward ({passes.model})"
        )
    lines += _line("host link", probe.host_link_GBps, "{:.4g} GB/s each to the machine's memory")
    lines += _line("host memory", probe.host_memory_GBps, "{:.4g} GB/s by all processors")
    if (disk := probe.disk) is not None:
        lines.append(f"  disk        {disk.write_GBps:.3g} GB/s written, {disk.read_GBps:.3g} GB/s read")
    if (decode := probe.decode) is not None:
        steps = ", ".join(f"{point.batch}: {1000 * point.step_s:.2f} ms" for point in decode.points)
        lines.append(f"  decode step {steps} ({decode.engine}, {decode.params / 1e6:.3g}M parameters, {decode.model})")
    if (reward := probe.reward) is not None:
        lines.append(
            f"  reward      {reward.samples_per_second:.4g} samples/s by a worker ({reward.model}, "
            f"{reward.num_samples} samples), {reward.memory_GB:.2g} GB"
        )
    for link in probe.links:
        lines.append(
            f"  link        to {link.machine} of {link.site}: {link.send_Gbps:.3g} Gbps sent, "
            f"{link.receive_Gbps:.3g} received, {link.round_trip_ms:.2f} ms round trip"
        )
    return lines + [f"  absent      {name}: {why}" for name, why in probe.absent.items()]


def clock_difference(name: str, link: MeasuredLink) -> str | None:
    """What is wrong with the clocks of both ends of a link, in a line; None if nothing is."""
    ahead_s = link.clock_ahead_s
    if ahead_s is None or abs(ahead_s) < CLOCK_OFF_S:
        return None
    which = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of {link.machine} is {abs(ahead_s):.0f} s {which} that of {name}; set both by NTP, or certificates "
        "are refused"
    )


def _line(name: str, value: float | None, text: str) -> list[str]:
    return [] if value is None else [f"  {name:<11} {text.format(value)}"]
