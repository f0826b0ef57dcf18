"""`launch k8s`: what it prints is a JobSet by the published schema, and restarts what the launcher itself would."""

import gzip
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tables import one_test

from roxxel_dist.cli import main
from roxxel_dist.launcher.policy.outcome import INFRASTRUCTURE, PREEMPTED

Plain = dict[str, Any]
ROOT = Path(__file__).parents[2]
CRD = Path(__file__).parent / "schemas" / "jobset_crd_v0.12.0.yaml.gz"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
METADATA = {"name", "namespace", "labels", "annotations"}
FULL = [
    *("--hosts", "4", "--image", "example/image:1", "--procs-per-host", "2", "--gpus-per-host", "8", "--name", "full"),
    *("--namespace", "team-a", "--volume", "shared:/shared", "--volume", "other.claim:/more", "--secret", "wandb"),
    *("--secret", "second", "--env", "NCCL_DEBUG=INFO", "--env", "WANDB_API_KEY", "--cpu", "16", "--memory", "64Gi"),
    *("--grace", "60.5", "--step-timeout", "90", "--all-ranks", "--port", "3000"),
]
TRAIN = ["train", "--data_path", "/shared/data", "--run_dir", "/shared/runs/full"]


def strict(schema: Any) -> Any:
    """The schema of a resource, as the server applies it with `--validate=strict`: unknown fields are errors."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


@pytest.fixture(scope="module")
def validator() -> Any:
    crd = yaml.load(gzip.decompress(CRD.read_bytes()), LOADER)
    (version,) = [one for one in crd["spec"]["versions"] if one["name"] == "v1alpha2"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {  # the server knows it by itself
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("name", "namespace")}
        | {name: {"type": "object", "additionalProperties": {"type": "string"}} for name in ("labels", "annotations")},
        "additionalProperties": False,
        "required": ["name"],
    }
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*words: str) -> str:
        code = main(["launch", "k8s", *words])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return call


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "k8s", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def problems(validator: Any, told: Plain) -> list[str]:
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in validator.iter_errors(told)]


def loaded(text: str) -> Plain:
    """The JobSet; before it may be what its launcher may do."""
    *_, told = yaml.load_all(text, LOADER)
    return told


def job_of(told: Plain) -> Plain:
    """The job whose pods have a launcher; that of pods that wait comes before it."""
    return told["spec"]["replicatedJobs"][-1]["template"]["spec"]


def pod_of(told: Plain) -> Plain:
    return job_of(told)["template"]["spec"]


def check_by_hand(told: Plain) -> None:
    """What no schema says: the webhooks of JobSet and the validation of Job and Pod (their sources, by name)."""
    name, spec = told["metadata"]["name"], told["spec"]
    label = r"[a-z]([-a-z0-9]*[a-z0-9])?"
    jobs = {one["name"]: one for one in spec["replicatedJobs"]}
    assert len(jobs) == len(spec["replicatedJobs"])
    for number, (kind, one) in enumerate(jobs.items()):
        job = one["template"]["spec"]
        pod_name = f"{name}-{kind}-{one['replicas'] - 1}-{job['completions'] - 1}-abcde"
        assert re.fullmatch(label, pod_name)  # jobset_webhook.go, ValidateCreate
        assert len(pod_name) <= 63
        assert all(list(jobs).index(before["name"]) < number for before in one.get("dependsOn", []))
        check_job(job)
    assert set(spec["successPolicy"].get("targetReplicatedJobs", [])) <= {*jobs}
    for rule in spec["failurePolicy"]["rules"]:
        assert set(rule.get("targetReplicatedJobs", [])) <= {*jobs}
    assert re.fullmatch(label, spec["network"]["subdomain"])
    assert "startupPolicy" not in spec  # CEL: not beside dependsOn
    names = [rule["name"] for rule in spec["failurePolicy"]["rules"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule) for rule in names)


def check_job(job: Plain) -> None:
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy needs
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert 0 <= job["backoffLimit"] < 2**31
    for rule in job.get("podFailurePolicy", {}).get("rules", []):
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        codes = rule.get("onExitCodes", {}).get("values", [1])
        assert codes == sorted(set(codes) - {0})
        assert len(codes) <= 255
    container = pod["containers"][0]
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    assert len(set(mounts)) == len(mounts)
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    variables = [one["name"] for one in container["env"]]
    assert len(set(variables)) == len(variables)
    assert all(("value" in one) != ("valueFrom" in one) for one in container["env"])


@pytest.mark.parametrize(
    "words",
    [
        ["--hosts", "1", "--image", "i", "--", "true"],
        ["--hosts", "2", "--image", "i", "--max-restarts", "0", "--one-per-node", "--cpu", "500m", "--", "true"],
        ["--hosts", "4", "--image", "i", "--tpu", "tpu-v5-lite-podslice", "--topology", "4x4", "--", "python", "x.py"],
        [*FULL, "--", *TRAIN],
        [*FULL, "--spare-hosts", "1", "--", *TRAIN],
        ["--member", *FULL, "--", *TRAIN],
        ["--member", "--hosts", "2", "--image", "i", "--max-restarts", "0", "--", "true"],
    ],
)
def test_the_schema_takes_it(words: list[str], printed: Callable[..., str], validator: Any) -> None:
    text = printed(*words)
    told = loaded(text)
    assert problems(validator, told) == []
    check_by_hand(told)
    assert "&id" not in text  # anchors are hard to read, and to change by hand


def slips(told: Plain) -> Iterator[tuple[str, Plain]]:
    """The manifest with one thing wrong, at every depth."""
    text = json.dumps(told)
    spec = ["failurePolicy", "maxRestarts", "completionMode", "onExitCodes", "subdomain", "enableDNSHostnames"]
    pod = ["emptyDir", "restartPolicy", "secretKeyRef", "topologyKey", "mountPath", "backoffLimit"]
    for name in spec + pod:
        yield name, json.loads(text.replace(f'"{name}":', f'"{name}s":', 1))
    for wrong in ('"backoffLimit": "0"', '"action": "RestartAll"', '"maxRestarts": -1.5', '"status": true'):
        name = wrong.partition(":")[0]
        yield wrong, json.loads(re.sub(rf'{name}: ("[^"]*"|[^,}}]*)', wrong, text, count=1))


@pytest.mark.parametrize("kind", [[], ["--member"]], ids=["controller", "member"])
def test_a_slip_is_found_at_every_depth(kind: list[str], printed: Callable[..., str], validator: Any) -> None:
    told = loaded(printed(*kind, *FULL, "--", *TRAIN))
    found = dict(slips(told))
    assert len(found) == 16
    for name, wrong in found.items():
        assert wrong != told, name
        assert problems(validator, wrong), name


def outcome(told: Plain, code: int | None) -> str:
    """What follows when a pod ends with this code (None: it was disrupted): Job's controller, then JobSet's."""
    message, reason = "Job has reached the specified backoff limit", "BackoffLimitExceeded"
    for index, rule in enumerate(job_of(told)["podFailurePolicy"]["rules"]):
        if "onPodConditions" in rule:
            hit = code is None
        else:
            inside = code in rule["onExitCodes"]["values"]
            hit = code is not None and inside == (rule["onExitCodes"]["operator"] == "In")
        if hit:
            what = "has condition DisruptionTarget" if code is None else f"failed with exit code {code}"
            message, reason = f"Pod default/x {what} matching FailJob rule at index {index}", "PodFailurePolicy"
            break
    for rule in told["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet" if told["spec"]["failurePolicy"]["maxRestarts"] else "FailJobSet"


def test_each_exit_code_has_the_consequence_that_the_launcher_gives_it(printed: Callable[..., str]) -> None:
    told = loaded(printed("--member", "--hosts", "2", "--image", "i", "--", "true"))
    assert told["spec"]["failurePolicy"]["maxRestarts"] == 5
    assert outcome(told, None) == "RestartJobSetAndIgnoreMaxRestarts"
    for code in range(1, 256):
        if code in PREEMPTED:
            expected = "RestartJobSetAndIgnoreMaxRestarts"
        elif code in INFRASTRUCTURE or code in (69, 75, 124):
            expected = "RestartJobSet"
        else:
            expected = "FailJobSet"
        assert outcome(told, code) == expected, code
    assert {outcome(told, code) for code in (1, 2, 127)} == {"FailJobSet"}
    never = loaded(printed("--member", "--hosts", "2", "--image", "i", "--max-restarts", "0", "--", "true"))
    assert {outcome(never, code) for code in (None, *range(1, 256))} == {"FailJobSet"}


def test_what_a_member_runs_and_has(printed: Callable[..., str]) -> None:
    told = loaded(printed("--member", *FULL, "--", *TRAIN))
    pod, container = pod_of(told), pod_of(told)["containers"][0]
    before = "roxxel-dist launch member --hosts 4 --first full-hosts-0-0.full --run-id full --procs-per-host 2"
    options = "--gpus-per-host 8 --port 3000 --step-timeout 90 --grace 60.5 --all-ranks"
    assert container["command"] == [*f"{before} {options}".split(), "--", *TRAIN]
    assert told["metadata"] == {"name": "full", "namespace": "team-a"}
    assert pod["terminationGracePeriodSeconds"] == 76
    assert container["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 8},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "second"}}]
    env = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "WANDB_API_KEY"}}
    assert env["ROXXEL_RESTARTS"]["fieldRef"]["fieldPath"].endswith("['jobset.sigs.k8s.io/restart-attempt']")
    assert [one.get("persistentVolumeClaim") for one in pod["volumes"]][1:] == [
        {"claimName": "shared"},
        {"claimName": "other.claim"},
    ]
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": "full"}


def test_only_a_lost_launcher_starts_the_jobset_again(printed: Callable[..., str]) -> None:
    told = loaded(printed("--hosts", "2", "--image", "i", "--", "true"))
    for code in (None, *range(1, 256)):
        if code is None or code in PREEMPTED:
            expected = "RestartJobSetAndIgnoreMaxRestarts"
        else:
            expected = "RestartJobSet" if code in (134, 135, 137, 139) else "FailJobSet"
        assert outcome(told, code) == expected, code
    never = loaded(printed("--hosts", "2", "--image", "i", "--max-restarts", "0", "--", "true"))
    assert {outcome(never, code) for code in (None, *range(1, 256))} == {"FailJobSet"}
    assert told["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["controller"]}
    assert {tuple(rule["targetReplicatedJobs"]) for rule in told["spec"]["failurePolicy"]["rules"]} == {("controller",)}


def test_the_pods_wait_and_the_first_one_has_the_launcher(printed: Callable[..., str]) -> None:
    account, role, binding, told = yaml.load_all(printed(*FULL, "--", *TRAIN), LOADER)
    waiting, first = told["spec"]["replicatedJobs"]
    names = ["full-controller-0", "full-hosts-0", "full-hosts-1", "full-hosts-2"]
    container = pod_of(told)["containers"][0]
    via = f"kubectl exec -i job/{{host}} -c {container['name']} --"
    before = ["roxxel-dist", "launch", "exec", "--hosts", ",".join(names), "--via", via, "--run-id", "full"]
    options = "--procs-per-host 2 --gpus-per-host 8 --port 3000 --step-timeout 90 --grace 60.5 --all-ranks"
    assert container["command"][: len(before)] == before
    assert container["command"][len(before) :] == [*f"{options} --host-timeout 600".split(), "--", *TRAIN]
    assert (waiting["name"], waiting["replicas"], first["name"], first["replicas"]) == ("hosts", 3, "controller", 1)
    assert first["dependsOn"] == [{"name": "hosts", "status": "Ready"}]
    alone = waiting["template"]["spec"]
    pod, other = pod_of(told), alone["template"]["spec"]
    assert (alone["completions"], alone["backoffLimit"]) == (1, 2**31 - 1)  # a pod that is lost is made anew
    assert "podFailurePolicy" not in alone
    assert other["automountServiceAccountToken"] is False
    assert pod["serviceAccountName"] == account["metadata"]["name"] == "full-controller"
    same = ("resources", "envFrom", "volumeMounts", "image", "name", "env")
    assert {name: container[name] for name in same} == {name: other["containers"][0][name] for name in same}
    assert {one["metadata"]["namespace"] for one in (account, role, binding, told)} == {"team-a"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "full-controller", "namespace": "team-a"}]
    allowed = {resource: rule for rule in role["rules"] for resource in rule["resources"]}
    assert allowed["jobs"]["resourceNames"] == names
    assert {name: rule["verbs"] for name, rule in allowed.items()} == {
        "jobs": ["get"], "pods": ["get", "list", "watch"], "pods/exec": ["create", "get"],
    }  # fmt: skip


def test_a_start_with_fewer_hosts_does_not_wait_for_all_pods(printed: Callable[..., str]) -> None:
    for words in (["--min-hosts", "1"], ["--spare-hosts", "1"]):
        told = loaded(printed("--hosts", "2", "--image", "i", *words, "--", "true"))
        assert "dependsOn" not in told["spec"]["replicatedJobs"][-1]
        assert " ".join(words) in " ".join(pod_of(told)["containers"][0]["command"])
    told = loaded(printed("--hosts", "1", "--image", "i", "--", "true"))
    assert [one["name"] for one in told["spec"]["replicatedJobs"]] == ["controller"]


def test_a_pod_gets_the_words_as_they_were_given(printed: Callable[..., str]) -> None:
    words = ["echo", "$HOME", "$(HOME)", "a$$b", "é\n ☃", "", "--", "on", "1"]
    told = loaded(printed("--hosts", "1", "--image", "i", "--env", "A=$(B)", "--", *words))
    container = pod_of(told)["containers"][0]
    assert [expanded(word) for word in container["command"]][-len(words) :] == words
    assert expanded(container["env"][-1]["value"]) == "$(B)"


def expanded(word: str, variables: Mapping[str, str] = {"HOME": "/root", "B": "x"}) -> str:
    """What Kubernetes makes of a word (third_party/forked/golang/expansion)."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]),
        word,
    )


def test_tpu(printed: Callable[..., str]) -> None:
    words = ["--hosts", "4", "--image", "i", "--tpu", "tpu-v5-lite-podslice", "--topology", "4x4", "--", "true"]
    told = loaded(printed(*words))
    assert pod_of(told)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert pod_of(told)["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}


def test_threads_are_the_same_on_all_nodes(printed: Callable[..., str]) -> None:
    words = ["--hosts", "4", "--image", "i", "--cpu"]
    cases = [
        (["3500m"], "4"),
        (["8"], "8"),
        (["0.5", "--devices-per-proc", "3"], "12"),
        (["8", "--gpus-per-host", "1"], None),
    ]
    for more, threads in cases:
        told = loaded(printed(*words, *more, "--", "true"))
        env = {one["name"]: one.get("value") for one in pod_of(told)["containers"][0]["env"]}
        assert env.get("PJRT_NPROC") == threads


@one_test(
    ("words", "said"),
    [
        (["--hosts", "0"], "--hosts 0: must be at least 1"),
        *(
            (["--name", name], f"--name '{re.escape(name)}': use at most 42 small letters")
            for name in ("My_Name", "9lives", "x.", "-x", "x-", "", "a" * 43)
        ),
        (["--namespace", "A"], "--namespace 'A': use at most 63 small letters"),
        (["--secret", "My_Keys"], "--secret 'My_Keys': use small letters"),
        (["--volume", "My_Claim:/x"], "--volume 'My_Claim': use small letters"),
        (["--image", ""], "--image '': name an image"),
        (["--image", "a b"], "--image 'a b': name an image"),
        (["--cpu", "0"], "--cpu 0: write an amount"),
        (["--memory", "0.0Gi"], "--memory 0.0Gi: write an amount"),
        (["--volume", "claim"], "--volume 'claim': write CLAIM:/path"),
        (["--tpu", "v5"], "--tpu and --topology belong together"),
        (["--tpu", "v5", "--topology", "4"], "--topology '4': write for example 4x4"),
        (["--tpu", "v5", "--topology", "0x4"], "--topology '0x4': write for example 4x4"),
        (["--tpu", "v5", "--topology", "3x3"], "--topology 3x3 has 9 chips, which is not a multiple of --hosts 2"),
        (["--tpu", "v5", "--topology", "2x2", "--procs-per-host", "4"], "--procs-per-host 4: a host of a TPU slice"),
        (["--gpus-per-host", "3", "--procs-per-host", "2"], "--gpus-per-host 3 is not a multiple"),
        (["--procs-per-host", "0"], "--procs-per-host 0"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--grace", "inf"], "--grace inf"),
        (["--env", "ROXXEL_ATTEMPT=1"], "--env ROXXEL_ATTEMPT: the launcher sets this"),
        (["--env", "A"], "--env A has no value: write NAME=VALUE, or name its Secret"),
        (["--env", "1A=3"], "'1A' is no variable"),
        (["--spare-hosts", "2"], "--spare-hosts 2: there are 2 hosts; use at most 1"),
        (["--min-hosts", "3"], "--min-hosts 3: there are 2 hosts; use at most 2"),
        (["--member", "--min-hosts", "1"], "--min-hosts needs a launcher that sees all pods: leave --member out"),
        (["--member", "--spare-hosts", "1"], "--spare-hosts needs a launcher that sees all pods"),
    ],
)
def test_slips_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    usual = {"--hosts": "2", "--image": "i"}
    base = [word for flag, value in usual.items() if flag not in words for word in (flag, value)]
    error = refused(capsys, *base, *words, "--", "true")
    assert re.search(said, error), error


@pytest.mark.parametrize("where", ["--env", "--env-from", "--notify", "--preflight", "command"])
def test_no_secret_gets_into_a_manifest(where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("A=1\nHF_TOKEN=sekrit\n")
    options = {
        "--env": ["--env", "HF_TOKEN=sekrit"],
        "--env-from": ["--env-from", str(file)],
        "--notify": ["--notify", "HF_TOKEN=sekrit send"],
        "--preflight": ["--preflight", "HF_TOKEN=sekrit look"],
        "command": [],
    }[where]
    command = ["program", "--api-key", "sekrit"] if where == "command" else ["true"]
    error = refused(capsys, "--hosts", "2", "--image", "i", "--secret", "s", *options, "--", *command)
    assert "would stand in the manifest" in error
    assert "sekrit" not in error


def test_a_key_of_a_secret_wins_over_a_file(printed: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("A=1\nHF_TOKEN=sekrit\n")
    words = ["--secret", "s", "--env-from", str(file), "--env", "HF_TOKEN", "--env", "A=2", "--", "true"]
    text = printed("--hosts", "2", "--image", "i", *words)
    assert "sekrit" not in text
    env = {one["name"]: one.get("value") for one in pod_of(loaded(text))["containers"][0]["env"]}
    assert (env["A"], env["HF_TOKEN"]) == ("2", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--data_path", "x"], "train without --run_dir"),
        (["train", "--data_path", "x", "--run_dir", "runs/x"], "--run_dir runs/x is in no --volume"),
        (["train", "--data_path", "x", "--run_dir", "/shared2/x"], "--run_dir /shared2/x is in no --volume"),
        (["train", "--data_path", "x", "--run_dir", "/shared/../x"], "--run_dir /shared/../x is in no --volume"),
        (["train", "--data_path", "x", "--run_dir", "/shared/x", "--batch_size", "0"], "batch_size"),
    ],
)
def test_a_run_must_outlive_its_pods(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "--hosts", "2", "--image", "i", "--volume", "c:/shared", "--", *words)


def test_a_config_may_be_in_the_image_alone(printed: Callable[..., str]) -> None:
    words = ["--hosts", "2", "--image", "i", "--volume", "c:/shared", "--", "train", "--config", "/only/there.yaml"]
    assert "/only/there.yaml" in printed(*words, "--run_dir", "/shared/x")


def documented() -> dict[str, list[str]]:
    """The commands of docs/howto that print a file of `launch/`: its name, and the words."""
    pages = (ROOT / "docs" / "howto" / name for name in ("kubernetes.md", "tpu.md"))
    text = "".join(page.read_text() for page in pages).replace("\\\n", " ")
    found = re.findall(r"^(roxxel-dist launch k8s .*?) > (\S+)$", text, re.M)
    return {name: shlex.split(line)[1:] for line, name in found}


@pytest.mark.parametrize("name", ["jobset.yaml", "jobset_tpu.yaml"])
def test_the_files_in_launch_are_what_the_documented_commands_print(
    name: str, capsys: pytest.CaptureFixture[str], validator: Any
) -> None:
    assert main(documented()[name]) == 0
    out = capsys.readouterr().out
    assert (ROOT / "launch" / name).read_text() == out
    assert problems(validator, loaded(out)) == []
