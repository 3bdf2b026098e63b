"""Holds manifests against the schemas of Kubernetes, and against what a deployment of Weir must have.

    check.py BUILT.yaml...

First it takes one thing after the other out of a good manifest, each of which it must miss.
"""

import copy
import functools
import json
import pathlib
import re
import sys
import tomllib

import kubernetes_validate
import yaml

# The oldest that has preStop with sleep, and the newest that there are schemas of.
KUBERNETES_VERSIONS = ["1.30", "1.33"]
ROOT = pathlib.Path(__file__).resolve().parents[2]
CAPABILITIES = {
    "api": {"quota", "slot", "request", "tier", "sale"},
    "worker": {"request", "sale"},
    "sender": {"quota", "slot"},
    "reconciler": {"request", "sale"},
}


class Manifests:
    """What kustomize has built, with everything that is wrong with it."""

    def __init__(self, name, documents):
        self.name, self.documents, self.findings = name, documents, []

    def all(self, kind):
        return [document for document in self.documents if document["kind"] == kind]

    def expect(self, condition, document, message):
        if not condition:
            self.findings.append(f"{self.name}: {document['kind']} {document['metadata']['name']}: {message}")

    def check(self):
        for document in self.documents:
            self.check_schema(document)
            is_namespace = document["kind"] == "Namespace"
            self.expect(is_namespace or document["metadata"].get("namespace"), document, "has no namespace")
            self.expect(document["kind"] != "Secret", document, "secrets are only referred to")
        deployments = self.all("Deployment")
        roles = sorted(role(deployment) for deployment in deployments)
        if roles != sorted(CAPABILITIES):
            self.findings.append(f"{self.name}: the deployments have the roles {roles}, not each of {sorted(CAPABILITIES)} once")
        for deployment in deployments:
            self.check_pod(deployment)
            self.check_container(deployment)
            self.check_selection(deployment)
        self.check_services()
        self.check_autoscalers()
        for namespace in self.all("Namespace"):
            enforced = namespace["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce")
            self.expect(enforced == "restricted", namespace, "does not enforce the restricted pod security standard")
        return self.findings

    def check_schema(self, document):
        for version in KUBERNETES_VERSIONS:
            error = schema_error(json.dumps(document), version)
            self.expect(error is None, document, f"{error} (Kubernetes {version})")

    def check_pod(self, deployment):
        spec = pod(deployment)
        security = spec.get("securityContext", {})
        self.expect(security.get("runAsNonRoot") is True and security.get("runAsUser", 0) > 0, deployment, "may run as root")
        seccomp = security.get("seccompProfile", {}).get("type")
        self.expect(seccomp == "RuntimeDefault", deployment, "has no seccomp profile")
        self.expect(spec.get("automountServiceAccountToken") is False, deployment, "has a token of Kubernetes")
        # Else a service named weir sets WEIR_PORT and others, which are settings to Weir.
        self.expect(spec.get("enableServiceLinks") is False, deployment, "has variables of services among its settings")
        for shared in ("hostNetwork", "hostPID", "hostIPC"):
            self.expect(not spec.get(shared), deployment, f"has {shared}")
        maps = {document["metadata"]["name"]: document for document in self.all("ConfigMap")}
        settings = {}
        for volume in spec.get("volumes", []):
            self.expect("hostPath" not in volume, deployment, "mounts a path of the node")
            if "configMap" in volume:
                name = volume["configMap"]["name"]
                self.expect(name in maps, deployment, f"mounts the ConfigMap {name}, which does not exist")
                settings = tomllib.loads(maps.get(name, {}).get("data", {}).get("weir.toml", ""))
        stop = re.fullmatch(r"(\d+)s", settings.get("http", {}).get("shutdown_timeout", "15s"))
        wait = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        self.expect(wait > 0, deployment, "stops before load balancers know")
        needed = wait + int(stop.group(1))
        grace = spec.get("terminationGracePeriodSeconds", 30)
        self.expect(grace > needed, deployment, f"is killed after {grace} s, but a stop may take {needed} s")

    def check_container(self, deployment):
        for container in pod(deployment)["containers"]:
            security = container.get("securityContext", {})
            self.expect(security.get("readOnlyRootFilesystem") is True, deployment, "has a root filesystem that can be changed")
            self.expect(security.get("allowPrivilegeEscalation") is False, deployment, "may gain privileges")
            self.expect(security.get("capabilities", {}).get("drop") == ["ALL"], deployment, "keeps capabilities")
            self.expect(not security.get("privileged"), deployment, "is privileged")
            resources = container.get("resources", {})
            self.expect({"cpu", "memory"} <= set(resources.get("requests", {})), deployment, "requests no resources")
            self.expect("memory" in resources.get("limits", {}), deployment, "has no limit of memory")
            image = container["image"]
            self.expect(re.search(r":\d+\.\d+\.\d+$|@sha256:", image), deployment, f"the image {image} has no version")
            secrets = [source["secretRef"]["name"] for source in container.get("envFrom", []) if "secretRef" in source]
            self.expect("weir" in secrets, deployment, "does not refer to the secret weir")
            ports = {port["name"] for port in container["ports"]}
            paths = {}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                get = container.get(probe, {}).get("httpGet", {})
                self.expect(get.get("port") in ports, deployment, f"the {probe} is about no port of the container")
                paths[probe] = get.get("path")
            self.expect(paths["livenessProbe"] == "/livez", deployment, "is restarted because of an engine")
            ready = {"/readyz"} | {f"/readyz/{capability}" for capability in CAPABILITIES.get(role(deployment), ())}
            self.expect(paths["readinessProbe"] in ready, deployment, f"cannot answer {paths['readinessProbe']}")

    def check_selection(self, deployment):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        for other in self.all("Deployment"):
            is_same = other is deployment
            is_selected = selects(other["spec"]["selector"], labels)
            self.expect(is_selected == is_same, deployment, f"{other['metadata']['name']} selects its pods: {is_selected}")
        budgets = [budget for budget in self.all("PodDisruptionBudget") if selects(budget["spec"]["selector"], labels)]
        self.expect(len(budgets) == 1, deployment, f"has {len(budgets)} disruption budgets")
        for spread in pod(deployment).get("topologySpreadConstraints", []):
            self.expect(selects(spread["labelSelector"], labels), deployment, "spreads other pods")
        policies = [policy["spec"] for policy in self.all("NetworkPolicy") if selects(policy["spec"]["podSelector"], labels)]
        closed = [policy for policy in policies if "ingress" not in policy and "egress" not in policy]
        both = any(set(policy["policyTypes"]) == {"Ingress", "Egress"} for policy in closed)
        self.expect(both, deployment, "no network policy closes it")
        named = {port["name"] for port in pod(deployment)["containers"][0]["ports"]}
        for policy in policies:
            rules = [port["port"] for rule in policy.get("ingress", []) for port in rule.get("ports", [{"port": None}])]
            self.expect(set(rules) <= named, deployment, f"a network policy opens {rules}, its ports are {sorted(named)}")

    def check_services(self):
        for service in self.all("Service"):
            selector = {"matchLabels": service["spec"]["selector"]}
            selected = [d for d in self.all("Deployment") if selects(selector, d["spec"]["template"]["metadata"]["labels"])]
            self.expect([role(d) for d in selected] == ["api"], service, "leads to others than the servers of the API")
            for deployment in selected:
                named = {port["name"] for port in pod(deployment)["containers"][0]["ports"]}
                ports = {port["targetPort"] for port in service["spec"]["ports"]}
                self.expect(ports <= named, service, f"leads to {sorted(ports)}, the ports are {sorted(named)}")

    def check_autoscalers(self):
        names = {deployment["metadata"]["name"]: deployment for deployment in self.all("Deployment")}
        external = yaml.safe_load((ROOT / "deploy/kubernetes/prometheus-adapter.yaml").read_text())["rules"]["external"]
        known = {rule["name"]["as"] for rule in external}
        for scaler in self.all("HorizontalPodAutoscaler"):
            target = names.get(scaler["spec"]["scaleTargetRef"]["name"])
            self.expect(target, scaler, "scales a deployment that does not exist")
            self.expect(scaler["spec"]["minReplicas"] >= 2, scaler, "lets a single server be all there is")
            if target:
                self.expect("replicas" not in target["spec"], target, "each apply would undo the autoscaler")
            for metric in scaler["spec"]["metrics"]:
                if metric["type"] == "External":
                    name = metric["external"]["metric"]["name"]
                    self.expect(name in known, scaler, f"prometheus-adapter.yaml does not make {name}")


@functools.cache
def schema_error(document, version):
    """What is wrong with a document, in JSON, by the schema of its kind. Fields that are not in the schema are errors, too."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(str(part) for part in error.path)}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return error.message
    return None


def pod(deployment):
    return deployment["spec"]["template"]["spec"]


def role(deployment):
    variables = pod(deployment)["containers"][0].get("env", [])
    return next((variable["value"] for variable in variables if variable["name"] == "WEIR_ROLES"), "")


def selects(selector, labels):
    """Whether a selector, with labels and `In`, selects what has these labels."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return wanted and all(labels.get(expression["key"]) in expression["values"] for expression in expressions)


def change(documents, kind, path, value):
    """Sets a value in the first document of a kind, or takes it out."""
    changed = copy.deepcopy(documents)
    if path is None:
        return [document for document in changed if document["kind"] != kind]
    at = next(document for document in changed if document["kind"] == kind)
    *way, last = path
    for step in way:
        at = at[step]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return changed


SPEC = ["spec", "template", "spec"]
CONTAINER = [*SPEC, "containers", 0]
# Each makes a good manifest a bad one.
FAULTS = [
    ("Deployment", [*SPEC, "securityContext", "runAsNonRoot"], None),
    ("Deployment", [*SPEC, "securityContext", "seccompProfile"], None),
    ("Deployment", [*SPEC, "enableServiceLinks"], None),
    ("Deployment", [*SPEC, "automountServiceAccountToken"], True),
    ("Deployment", [*SPEC, "terminationGracePeriodSeconds"], 20),
    ("Deployment", [*SPEC, "hostNetwork"], True),
    ("Deployment", [*SPEC, "terminationGracePeriod"], 40),
    ("Deployment", [*CONTAINER, "securityContext", "readOnlyRootFilesystem"], None),
    ("Deployment", [*CONTAINER, "securityContext", "capabilities"], None),
    ("Deployment", [*CONTAINER, "lifecycle"], None),
    ("Deployment", [*CONTAINER, "resources", "limits"], None),
    ("Deployment", [*CONTAINER, "image"], "weir:latest"),
    ("Deployment", [*CONTAINER, "envFrom"], None),
    ("Deployment", [*CONTAINER, "readinessProbe", "httpGet", "path"], "/readyz/gateway"),
    ("Deployment", [*CONTAINER, "livenessProbe", "httpGet", "path"], "/readyz"),
    ("Deployment", [*CONTAINER, "readinessProbe", "httpGet", "port"], "web"),
    ("Deployment", ["spec", "replicas"], 3),
    ("PodDisruptionBudget", None, None),
    ("PodDisruptionBudget", ["apiVersion"], "policy/v1beta1"),
    ("NetworkPolicy", None, None),
    ("NetworkPolicy", ["spec", "egress"], [{}]),
    ("ConfigMap", None, None),
    ("Service", ["spec", "selector"], {"app.kubernetes.io/name": "weir"}),
    ("Service", ["spec", "ports", 0, "targetPort"], "web"),
    ("HorizontalPodAutoscaler", ["spec", "scaleTargetRef", "name"], "weir"),
    ("HorizontalPodAutoscaler", ["spec", "minReplicas"], 1),
    ("Namespace", ["metadata", "labels"], None),
]


def main():
    findings, checks = [], 0
    for path in map(pathlib.Path, sys.argv[1:]):
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document]
        findings += Manifests(path.stem, documents).check()
        checks += len(documents)
        kinds = {document["kind"] for document in documents}
        if "HorizontalPodAutoscaler" in kinds:
            for fault in FAULTS:
                if not Manifests("", change(documents, *fault)).check():
                    findings.append(f"check.py does not see this fault: {fault}")
                checks += 1
    print(*findings, sep="\n", end="\n" if findings else "")
    # In cargo's format, which .ci/tests reads.
    print(f"test result: {'FAILED' if findings else 'ok'}. {checks - len(findings)} passed; {len(findings)} failed; 0 ignored")
    sys.exit(1 if findings or checks < len(FAULTS) else 0)


if __name__ == "__main__":
    main()
