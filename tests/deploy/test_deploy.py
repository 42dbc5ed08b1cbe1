"""What holds for deploy/: everything is valid, fits together, and names nothing that does not exist.

Run by tests/deploy.sh, which brings the tools.
"""

import base64
import json
import os
import re
import subprocess
import tempfile
import tomllib
import unittest
from functools import cache
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
OVERLAYS = ["cron", "spot-gpu", "single-node"]
# The oldest that deploy/README.md promises, and the newest that there are schemas for.
KUBERNETES = ["1.29", "1.37"]

# KEDA's kinds have no schema here. A ScaledJob is a Job with these keys around it (KEDA: apis/keda/v1alpha1).
SCALED_JOB = {
    "jobTargetRef", "pollingInterval", "successfulJobsHistoryLimit", "failedJobsHistoryLimit", "rollout",
    "envSourceContainerName", "minReplicaCount", "maxReplicaCount", "scalingStrategy", "triggers",
}
NATS_TRIGGER = {
    "natsServerMonitoringEndpoint", "account", "stream", "consumer", "lagThreshold", "activationLagThreshold", "useHttps",
}


def run(*command, **options):
    """The output of a program that must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command[0]} exits with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def read(path):
    return (ROOT / path).read_text()


@cache
def built(overlay):
    """The manifests of an overlay."""
    output = run(os.environ["KUBECTL"], "kustomize", DEPLOY / "kustomize/overlays" / overlay)
    return [doc for doc in yaml.safe_load_all(output) if doc]


def manifests():
    for overlay in OVERLAYS:
        for doc in built(overlay):
            yield overlay, doc
    yield "fill", yaml.safe_load(read("deploy/kustomize/fill.yaml"))


def pod_of(doc):
    """The pod template of a manifest, if it has one."""
    spec = doc.get("spec", {})
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    spec = spec.get("jobTargetRef", spec)
    if doc["kind"] == "Pod":
        return doc
    return spec.get("template")


def pods():
    for overlay, doc in manifests():
        if pod := pod_of(doc):
            yield overlay, f"{doc['kind']}/{doc['metadata']['name']}", pod


def laser_pods():
    for overlay, name, pod in pods():
        [container] = pod["spec"]["containers"]
        if container["name"] == "laser":
            yield overlay, name, pod["spec"], container


def size_at(path, pod, container):
    """The bytes that the volume mounted at a path may hold."""
    [mount] = [m["name"] for m in container["volumeMounts"] if m["mountPath"] == path]
    [volume] = [v for v in pod["volumes"] if v["name"] == mount]
    return int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30


def config_map(overlay, name):
    [found] = [d for d in built(overlay) if d["kind"] == "ConfigMap" and d["metadata"]["name"] == name]
    return found["data"]


def settings(overlay, pod, container):
    """laser.toml of a pod as {section: {key: value}}, and its environment."""
    [volume] = [v for v in pod["volumes"] if v["name"] == "config"]
    toml = tomllib.loads(config_map(overlay, volume["configMap"]["name"])["laser.toml"])
    environment = {e["name"]: e.get("value") for e in container["env"]}
    for source in container["envFrom"]:
        if "configMapRef" in source:
            environment |= config_map(overlay, source["configMapRef"]["name"])
    return toml, environment


@cache
def documented_keys():
    """Every `section.key` of configs/production.toml, those in comments too."""
    keys, section = set(), ""
    for line in read("configs/production.toml").splitlines():
        if heading := re.match(r"(?:# )?\[+([\w.]+)\]+\s*(?:#.*)?$", line):
            section = heading[1]
        elif key := re.match(r"(?:# )?(\w+) = ", line):
            keys.add(f"{section}.{key[1]}")
    return keys


def flat(table, prefix=""):
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        for value in values:
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"


class Kubernetes(unittest.TestCase):
    def test_manifests_are_valid(self):
        for where, doc in manifests():
            doc = dict(doc)
            if doc["kind"] == "ScaledJob":
                spec = doc["spec"]
                self.assertLessEqual(set(spec), SCALED_JOB)
                for trigger in spec["triggers"]:
                    self.assertEqual(trigger["type"], "nats-jetstream")
                    self.assertLessEqual(set(trigger["metadata"]), NATS_TRIGGER)
                    self.assertTrue(all(isinstance(v, str) for v in trigger["metadata"].values()))
                doc = {"apiVersion": "batch/v1", "kind": "Job", "metadata": doc["metadata"], "spec": spec["jobTargetRef"]}
            for version in KUBERNETES:
                with self.subTest(where, kind=doc["kind"], name=doc["metadata"]["name"], version=version):
                    kubernetes_validate.validate(doc, version, strict=True)

    def test_everything_is_in_one_namespace(self):
        for where, doc in manifests():
            if doc["kind"] != "Namespace":
                self.assertEqual(doc["metadata"].get("namespace"), "laser", f"{where} {doc['kind']}")

    def test_pods_meet_the_restricted_standard(self):
        for where, name, pod in pods():
            with self.subTest(where, pod=name):
                spec = pod["spec"]
                self.assertIs(spec["automountServiceAccountToken"], False)
                self.assertIs(spec["securityContext"]["runAsNonRoot"], True)
                self.assertGreater(spec["securityContext"]["runAsUser"], 0)
                self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
                for container in spec["containers"]:
                    expected = {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    }
                    self.assertEqual(container["securityContext"], expected)
                    resources = container["resources"]
                    self.assertLessEqual({"cpu", "memory"}, set(resources["requests"]))
                    self.assertIn("memory", resources["limits"])
                    self.assertNotRegex(container["image"], r"^[^/]*\.[^/]*/", "names a registry")

    def test_what_pods_refer_to_exists(self):
        secrets = set(re.findall(r"create secret generic (\S+)", read("deploy/README.md")))
        for where, name, pod in pods():
            if where == "fill":
                continue
            there = {(d["kind"], d["metadata"]["name"]) for d in built(where)}
            for kind, reference in references(pod["spec"]):
                with self.subTest(where, pod=name, reference=reference):
                    if kind == "Secret":
                        self.assertIn(reference, secrets, "deploy/README.md does not say how to create it")
                    else:
                        self.assertIn((kind, reference), there)

    def test_each_pod_has_a_network_policy_of_its_own(self):
        for where, name, pod in pods():
            if where == "fill":
                continue
            labels = pod["metadata"]["labels"]
            policies = [d["spec"]["podSelector"] for d in built(where) if d["kind"] == "NetworkPolicy"]
            self.assertIn({}, policies, "nothing is denied by default")
            self.assertTrue(any(s and selects(s, labels) for s in policies), f"{where} {name}: none allows anything")

    def test_scaling_watches_the_queue_that_laser_uses(self):
        [scaled] = [d for d in built("spot-gpu") if d["kind"] == "ScaledJob"]
        watched = scaled["spec"]["triggers"][0]["metadata"]
        conf = read("deploy/nats/laser.conf")
        self.assertIn(f'{watched["account"]} {{', conf)
        self.assertIn(f'"$JS.API.CONSUMER.MSG.NEXT.{watched["stream"]}.{watched["consumer"]}"', conf)


def references(pod):
    """(kind, name) of all that a pod mounts or takes its environment from."""
    for volume in pod["volumes"]:
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for container in pod["containers"]:
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                yield "ConfigMap", source["configMapRef"]["name"]
            if "secretRef" in source:
                yield "Secret", source["secretRef"]["name"]
    if "serviceAccountName" in pod:
        yield "ServiceAccount", pod["serviceAccountName"]


def selects(selector, labels):
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", []))


class Configuration(unittest.TestCase):
    def test_every_key_is_documented(self):
        for where, name, pod, container in laser_pods():
            toml, environment = settings(where, pod, container)
            from_environment = [
                e.removeprefix("LASER_").lower().replace("__", ".")
                for e in environment
                if e.startswith("LASER_") and "__" in e
            ]
            unknown = {*flat(toml), *from_environment} - documented_keys()
            self.assertFalse(unknown, f"{where} {name}: not in configs/production.toml")

    def test_keys_in_texts_are_documented(self):
        sections = {key.split(".")[0] for key in documented_keys()}
        for path in DEPLOY.rglob("*.*"):
            named = re.findall(r"\[(\w+)\] (\w+)", path.read_text())
            unknown = {f"{s}.{k}" for s, k in named if s in sections} - documented_keys()
            self.assertFalse(unknown, f"{path}: not in configs/production.toml")

    def test_subcommands_exist(self):
        commands = re.search(r"enum Command \{(.*?)\n\}", read("src/main.rs"), re.S)[1]
        exist = {c.lower() for c in re.findall(r"^    (\w+)[({,]", commands, re.M)}
        exist |= {c.lower() for c in re.findall(r"^    (\w+) \{", commands, re.M)}
        used = {container["args"][0] for _, _, _, container in laser_pods()}
        for path in ["deploy/README.md", "deploy/systemd/laser-night.service", "deploy/monitoring/alerts.yaml"]:
            used |= set(re.findall(r"(?:`|^ +|/bin/)laser ([a-z]+)", read(path), re.M))
        self.assertLessEqual(used, exist)

    def test_pods_outlive_the_grace_of_a_drain(self):
        default = tomllib.loads(read("configs/production.toml")).get("worker", {}).get("grace_seconds", 25)
        for where, name, pod, container in laser_pods():
            if container["args"][0] != "worker":
                continue
            toml, environment = settings(where, pod, container)
            grace = toml.get("worker", {}).get("grace_seconds", default)
            grace = int(environment.get("LASER_WORKER__GRACE_SECONDS", grace))
            self.assertGreater(pod["terminationGracePeriodSeconds"], grace, f"{where} {name}")

    def test_caches_fit_their_volumes(self):
        for where, name, pod, container in laser_pods():
            toml, _ = settings(where, pod, container)
            size = size_at(toml["worker"]["cache"], pod, container)
            self.assertGreater(size, toml["worker"]["cache_gb"] * 1e9, f"{where} {name}")

    def test_a_night_of_ten_million_entities_has_room_to_spill(self):
        # docs/operations.md, "Size": twice 1 kB per entity. Only the coordinator plans and publishes.
        for where, name, pod, container in laser_pods():
            if container["args"][0] != "coordinator":
                continue
            size = size_at("/tmp", pod, container)
            self.assertGreater(size, 10_000_000 * 2_000, f"{where} {name}")

    def test_each_role_has_its_user_and_inbox(self):
        conf = read("deploy/nats/laser.conf")
        for where, name, pod, container in laser_pods():
            role = container["args"][0]
            toml, environment = settings(where, pod, container)
            inbox = environment["LASER_QUEUE__INBOX_PREFIX"]
            self.assertEqual(inbox, f"_INBOX_{role}", f"{where} {name}")
            self.assertIn(f'subscribe: ["{inbox}.>"]', conf)
            [secret] = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
            self.assertEqual(secret, f"laser-nats-{role}", f"{where} {name}")

    def test_copies_are_as_many_as_servers(self):
        for where, name, pod, container in laser_pods():
            _, environment = settings(where, pod, container)
            [servers] = [d["spec"]["replicas"] for d in built(where) if d["kind"] == "StatefulSet"]
            self.assertEqual(int(environment["LASER_QUEUE__REPLICAS"]), servers, f"{where} {name}")


class Nats(unittest.TestCase):
    def test_servers_accept_their_configuration_and_the_documented_certificates(self):
        [make_certificates] = re.findall(r"```sh\n(.*?)```", read("deploy/README.md"), re.S)
        with tempfile.TemporaryDirectory() as folder:
            run("bash", "-euc", make_certificates, cwd=folder)
            run("openssl", "verify", "-CAfile", "ca.crt", "-purpose", "sslserver", "tls.crt", cwd=folder)
            run("openssl", "verify", "-CAfile", "ca.crt", "-purpose", "sslclient", "tls.crt", cwd=folder)
            environment = os.environ | {
                "LASER_NATS_STORE": f"{folder}/store",
                "LASER_NATS_CERT": f"{folder}/tls.crt",
                "LASER_NATS_KEY": f"{folder}/tls.key",
                "LASER_NATS_CA": f"{folder}/ca.crt",
                "LASER_NKEY_COORDINATOR": public_nkey(1),
                "LASER_NKEY_WORKER": public_nkey(2),
                "LASER_NKEY_OPERATOR": public_nkey(3),
            }
            for conf in ["laser.conf", "cluster.conf"]:
                with self.subTest(conf):
                    run(os.environ["NATS_SERVER"], "-t", "-c", DEPLOY / "nats" / conf, env=environment)


def public_nkey(number):
    """A well-formed public key of a user: prefix, 32 bytes, CRC-16/XMODEM, in base 32."""
    body = bytes([20 << 3]) + bytes([number] * 32)
    crc = 0
    for byte in body:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return base64.b32encode(body + crc.to_bytes(2, "little")).decode().rstrip("=")


class Monitoring(unittest.TestCase):
    def test_alert_rules_are_valid(self):
        run(os.environ["PROMTOOL"], "check", "rules", MONITORING / "alerts.yaml")

    def test_alerts_fire_when_they_should_and_only_then(self):
        run(os.environ["PROMTOOL"], "test", "rules", MONITORING / "alerts_test.yaml")

    def test_every_alert_is_seen_firing(self):
        tests = read("deploy/monitoring/alerts_test.yaml")
        for rule in alert_rules():
            self.assertIn(f'alertname="{rule["alert"]}"', tests)

    def test_dashboard_queries_parse(self):
        rules = [
            {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$run", ".*")}
            for number, expression in enumerate(queries())
        ]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
            file.flush()
            run(os.environ["PROMTOOL"], "check", "rules", file.name)

    def test_panels_have_unique_places(self):
        panels = dashboard()["panels"]
        self.assertEqual(len({p["id"] for p in panels}), len(panels))
        covered = [
            (x, y)
            for p in panels
            for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
            for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
        ]
        self.assertEqual(len(set(covered)), len(covered))

    def test_metrics_are_documented(self):
        documented = set(re.findall(r"^\| `(laser_\w+)` \|", read("deploy/README.md"), re.M))
        used = set()
        for expression in [*queries(), *(rule["expr"] for rule in alert_rules())]:
            used |= set(re.findall(r"laser_\w+", expression))
        self.assertLessEqual(used, documented)
        self.assertLessEqual(documented, used, "nobody looks at these")


def dashboard():
    return json.loads(read("deploy/monitoring/dashboard.json"))


def queries():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def alert_rules():
    groups = yaml.safe_load(read("deploy/monitoring/alerts.yaml"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


class OneMachine(unittest.TestCase):
    def test_units_are_valid(self):
        units = DEPLOY / "systemd"
        with tempfile.TemporaryDirectory() as folder:
            # Laser is not installed here, and a missing program is an error.
            service = (units / "laser-night.service").read_text().replace("/usr/local/bin/laser", "/bin/true")
            Path(folder, "laser-night.service").write_text(service)
            Path(folder, "laser-night.timer").write_text((units / "laser-night.timer").read_text())
            done = subprocess.run(
                ["systemd-analyze", "verify", f"{folder}/laser-night.service", f"{folder}/laser-night.timer"],
                capture_output=True,
                text=True,
            )
            # Unknown keys are warnings, which leave the exit status alone.
            ours = [line for line in done.stderr.splitlines() if "laser-night" in line]
            self.assertEqual((done.returncode, ours), (0, []))

    def test_units_shield_the_machine(self):
        service = DEPLOY / "systemd/laser-night.service"
        run("systemd-analyze", "security", "--offline=true", "--threshold=25", service)


class Image(unittest.TestCase):
    def test_dockerfile_is_clean(self):
        run("hadolint", "--no-color", DEPLOY / "Dockerfile")

    def test_it_has_every_engine_and_the_notices(self):
        dockerfile = read("deploy/Dockerfile")
        for part in ['--features "mistralrs', "COPY LICENSE NOTICE THIRD_PARTY.md", "licences.tar.gz"]:
            self.assertIn(part, dockerfile)

    def test_the_build_finds_what_it_copies(self):
        ignore = read(".dockerignore").split("\n")
        for name in ["Cargo.toml", "Cargo.lock", "LICENSE", "NOTICE", "THIRD_PARTY.md", "src", "configs"]:
            self.assertIn(f"!{name}", ignore)
        members = tomllib.loads(read("Cargo.toml"))["workspace"]["members"]
        for member in members:
            self.assertIn(f"!{member}", ignore)


if __name__ == "__main__":
    unittest.main()
