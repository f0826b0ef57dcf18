"""What nvidia-smi says of accelerators, in the forms that drivers of several years have printed."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.launcher.host import host_checks
from roxxel_dist.launcher.host.host_checks import HostChecks, gpu_problems
from roxxel_dist.launcher.job.spec import Limits
from roxxel_dist.launcher.preflight import devices

# The elements that matter, in the order and with the words of drivers 535 and 590.
GPU = """
	<gpu id="00000000:{bus}:00.0">
		<product_name>NVIDIA A100-SXM4-80GB</product_name>
		<mig_mode>
			<current_mig>Disabled</current_mig>
			<pending_mig>Disabled</pending_mig>
		</mig_mode>
		<mig_devices>
			None
		</mig_devices>
		<gpu_reset_status>
			<reset_required>No</reset_required>
			<drain_and_reset_recommended>No</drain_and_reset_recommended>
		</gpu_reset_status>
		<gpu_recovery_action>None</gpu_recovery_action>
		<pci>
			<pci_gpu_link_info>
				<pcie_gen>
					<max_link_gen>4</max_link_gen>
					<current_link_gen>1</current_link_gen>
				</pcie_gen>
			</pci_gpu_link_info>
		</pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
			<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
			<clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
		</clocks_event_reasons>
		<ecc_errors>
			<volatile>
				<sram_correctable>3</sram_correctable>
				<sram_uncorrectable>0</sram_uncorrectable>
				<dram_correctable>7</dram_correctable>
				<dram_uncorrectable>0</dram_uncorrectable>
			</volatile>
			<aggregate>
				<sram_uncorrectable>2</sram_uncorrectable>
				<dram_uncorrectable>9</dram_uncorrectable>
				<sram_threshold_exceeded>No</sram_threshold_exceeded>
			</aggregate>
			<channel_repair_pending>No</channel_repair_pending>
		</ecc_errors>
		<retired_pages>
			<pending_blacklist>N/A</pending_blacklist>
			<pending_retirement>N/A</pending_retirement>
		</retired_pages>
		<remapped_rows>
			<remapped_row_unc>1</remapped_row_unc>
			<remapped_row_pending>No</remapped_row_pending>
			<remapped_row_failure>No</remapped_row_failure>
		</remapped_rows>
		<fabric>
			<state>Completed</state>
			<status>Success</status>
		</fabric>
	</gpu>"""
CONSUMER = """
	<gpu id="00000000:09:00.0">
		<product_name>NVIDIA GeForce RTX 3090</product_name>
		<mig_mode><current_mig>N/A</current_mig><pending_mig>N/A</pending_mig></mig_mode>
		<gpu_recovery_action>None</gpu_recovery_action>
		<ecc_errors>
			<volatile>
				<sram_uncorrectable_parity>N/A</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
				<dram_uncorrectable>N/A</dram_uncorrectable>
			</volatile>
			<unrepairable_memory>N/A</unrepairable_memory>
		</ecc_errors>
		<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
		<remapped_rows>N/A</remapped_rows>
		<fabric><state>N/A</state><status>N/A</status></fabric>
	</gpu>"""
OLD = """
	<gpu id="0000:00:1E.0">
		<product_name>Tesla V100-SXM2-16GB</product_name>
		<clocks_throttle_reasons>
			<clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
		</clocks_throttle_reasons>
		<ecc_errors>
			<volatile>
				<single_bit><total>5</total></single_bit>
				<double_bit><device_memory>1</device_memory><total>2</total></double_bit>
			</volatile>
		</ecc_errors>
		<retired_pages>
			<double_bit_retirement><retired_count>1</retired_count></double_bit_retirement>
			<pending_retirement>Yes</pending_retirement>
		</retired_pages>
	</gpu>"""
MIG = "<ecc_error_count><volatile_count><sram_uncorrectable>0</sram_uncorrectable></volatile_count></ecc_error_count>"


def log(*gpus: str, before: str = "") -> str:
    """The whole output."""
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>'
    return f"{before}{head}\n\t<attached_gpus>{len(gpus)}</attached_gpus>{''.join(gpus)}\n</nvidia_smi_log>\n"


def gpu(bus: str = "07", **changes: str) -> str:
    """A healthy GPU, with other words in some elements."""
    text = GPU.format(bus=bus)
    for name, value in changes.items():
        before, _, rest = text.partition(f"<{name}>")
        text = f"{before}<{name}>{value}{rest[rest.index(f'</{name}>') :]}"
        assert rest, name
    return text


LOST = "Unable to determine the device handle for GPU0000:07:00.0: GPU is lost.  Reboot the system to recover this GPU"
UNKNOWN = "Unable to determine the device handle for GPU 00000000:8A:00.0: Unknown Error"
DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that it is installed."
# (the output, its exit code, what is found: (level, words) each)
CASES: dict[str, tuple[str, int, list[tuple[str, str]]]] = {
    "healthy: corrected, aggregate and remapped ones are history": (log(gpu(), gpu("0F")), 0, []),
    "a consumer card has no such counters": (log(CONSUMER), 0, []),
    "MIG": (log(gpu(current_mig="Enabled", mig_devices=MIG, remapped_rows="N/A")), 0, []),
    "ECC": (log(gpu(dram_uncorrectable="32")), 0, [("doubt", "32 uncorrectable memory errors")]),
    "a row waits": (log(gpu(remapped_row_pending="Yes")), 0, [("doubt", "a row of its memory waits for a reset")]),
    "a row cannot be replaced": (log(gpu(remapped_row_failure="Yes")), 0, [("error", "could not be replaced")]),
    "SRAM": (log(gpu(sram_threshold_exceeded="Yes")), 0, [("error", "its SRAM has had too many")]),
    "a page waits": (
        log(gpu(pending_blacklist="Yes", pending_retirement="Yes")),
        0,
        [("doubt", "a page of its memory")],
    ),
    "a channel waits": (log(gpu(channel_repair_pending="Yes")), 0, [("doubt", "a memory channel waits")]),
    "recovery: reset": (log(gpu(gpu_recovery_action="Reset")), 0, [("error", "recovery action is 'Reset'")]),
    "recovery: reboot": (log(gpu(gpu_recovery_action="Reboot")), 0, [("error", "recovery action is 'Reboot'")]),
    "recovery: drain": (log(gpu(gpu_recovery_action="Drain and Reset")), 0, [("doubt", "'Drain and Reset'")]),
    "reset required": (log(gpu(reset_required="Yes")), 0, [("error", "it must be reset")]),
    "too hot": (
        log(gpu(clocks_event_reason_hw_slowdown="Active", clocks_event_reason_hw_thermal_slowdown="Active")),
        0,
        [("doubt", "its hardware slows it down"), ("doubt", "it is too hot, and its hardware")],
    ),
    "fabric": (log(gpu(state="In Progress", status="N/A")), 0, [("doubt", "NVLink fabric is not ready")]),
    "an old driver": (
        log(OLD),
        0,
        [("doubt", "a page of its memory"), ("doubt", "2 uncorrectable"), ("doubt", "its hardware slows it down")],
    ),
    "a lost GPU alone": (LOST + "\n", 15, [("error", "GPU 0000:07:00.0: GPU is lost.  Reboot the system")]),
    "a lost GPU beside others": (
        log(gpu("0F"), before=UNKNOWN + "\n"),
        0,
        [("error", "00000000:8A:00.0: Unknown Error")],
    ),
    "no driver": (DRIVER, 9, [("error", "nvidia-smi failed (code 9): NVIDIA-SMI has failed because")]),
    "nothing": ("", 0, [("warning", "it printed nothing")]),
    "cut off": (log(gpu())[:900], 0, [("warning", "nvidia-smi failed (code 0)")]),
    "another language": (
        "Keine Geräte gefunden\n",
        6,
        [("error", "nvidia-smi failed (code 6): Keine Geräte gefunden")],
    ),
    "no GPU": ("No devices were found\n", 6, [("error", "No devices were found")]),
    "numbers that are none": (log(gpu(dram_uncorrectable="[Unknown Error]")), 0, []),
}


@one_test("case", CASES)
def test_what_nvidia_smi_says(case: str) -> None:
    text, code, expected = CASES[case]
    found = gpu_problems(text, code)
    assert [problem.level for problem in found] == [level for level, _ in expected], found
    for problem, (_, words) in zip(found, expected, strict=True):
        assert words in problem.text


def collected(tmp_path: Path, script: str, limits: Limits | None = None, **more: Any) -> dict[str, Any]:
    """What this host's checks find with a stand-in for `nvidia-smi`, which is the only program in PATH beside `sh`."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(stat.S_IRWXU)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAX_PLATFORMS": "cuda"}
    info = {"gpus": 1, "tpus": 0, "platforms": None}
    checks = HostChecks(
        {"mode": "auto", "env": env, "devices": None, "command": None, **more}, info, limits or Limits()
    )
    try:
        while (found := checks.collect())["pending"]:
            pass
        return found
    finally:
        checks.close()


def test_the_tool_is_asked_beside_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "MODULE", "no_such_module")  # there is no GPU
    (tmp_path / "xml").write_text(log(gpu(remapped_row_pending="Yes")))
    script = f"[ \"$LC_ALL $1\" = 'C -q' ] && cat {tmp_path}/xml"
    found = collected(tmp_path, script, command="echo one; echo $JAX_PLATFORMS; exit 3")
    assert [text.partition(":")[0] for _, text in found["problems"]] == ["GPU 0 (00000000"]
    assert found["command"] == "ended with code 3: cuda"
    assert "No module named" in found["devices"]["why"]


def test_a_tool_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "MODULE", "no_such_module")
    limits = Limits(tool_s=0.5, command_s=0.5)
    found = collected(tmp_path, "sleep 1000", limits, command="sleep 1000")
    assert [tuple(problem) for problem in found["problems"]] == [
        ("error", "nvidia-smi did not answer within 0.5 s: the driver or a GPU is stuck")
    ]
    assert found["command"] == "did not end within 0.5 s"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 1000", "nvidia-smi did not answer within 0.5 s: is persistence mode off?"),
        ("echo Failed to initialize NVML; exit 18", "nvidia-smi failed (code 18): Failed to initialize NVML"),
    ],
)
def test_a_tool_that_fails_beside_gpus_that_compute_is_a_warning(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_checks, "MODULE", "gpus_that_compute")
    of_gpu = """measure = None; main = lambda find: print('{"platform": "gpu", "devices": []}')"""
    (tmp_path / "gpus_that_compute.py").write_text(of_gpu)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = collected(tmp_path, script, Limits(tool_s=0.5))
    assert [tuple(problem) for problem in found["problems"]] == [("warning", said)]


def test_gpus_that_jax_does_not_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_cpu = """names = measure = None; main = lambda find: print('{"platform": "cpu", "kind": "cpu", "count": 1}')"""
    (tmp_path / "of_cpu.py").write_text(of_cpu)
    monkeypatch.setattr(host_checks, "MODULE", "of_cpu")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for platforms, unused in (("", "1 GPUs"), ("cpu", None)):
        env = {"PATH": str(tmp_path), "JAX_PLATFORMS": platforms}
        found = collected(tmp_path, "exit 1", env=env, lists=True)["devices"]
        assert found.get("unused") == unused
        texts = [one.text for one in devices.findings_of("a", {"devices": found})]
        assert bool(texts) == bool(unused)
        assert all("a: it has 1 GPUs, and jax uses the CPU: " in text and "[cuda12]" in text for text in texts)


def test_without_the_tool_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks, "MODULE", "no_such_module")
    monkeypatch.setattr(host_checks.shutil, "which", lambda *_, **__: None)
    assert collected(tmp_path, "exit 1")["problems"] == []
