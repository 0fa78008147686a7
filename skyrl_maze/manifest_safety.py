"""Who may do what: rights of the pods, secrets, who is let in. Problems as in `manifest_rules`."""

import re
from collections.abc import Iterator

from skyrl_maze.manifests import CLUSTER, RAY, Object, at, entries, mapping, pods_of

ACCESS = "access.sagemaker.amazonaws.com"
STRATEGIES = ("ray-access-strategy-private", "ray-access-strategy-public")
DASHBOARD_PORT, METRICS_PORT, SERVE_PORT = 8265, 8080, 8000
# Namespaces whose pods are let in, and where to: KubeRay's controller and the endpoint operator's proxy ask
# the dashboard, the observability add-on collects metrics.
DOORS = {
    "hyperpod-ray": DASHBOARD_PORT,
    "kuberay-operator": DASHBOARD_PORT,
    "hyperpod-observability": METRICS_PORT,
}
KUBERAY = "kuberay-operator"
_SECCOMP = {"type": "RuntimeDefault"}
_NAMESPACE, _NAME = "kubernetes.io/metadata.name", "app.kubernetes.io/name"


def security_problems(thing: Object) -> Iterator[str]:
    """Rights that a pod does not need: root, capabilities, the node, the Kubernetes API."""
    for template in pods_of(thing):
        pod = mapping(template, "spec")
        if pod.get("automountServiceAccountToken") is not False or not pod.get("serviceAccountName"):
            yield "the pod can call the Kubernetes API"
        if at(pod, "securityContext", "seccompProfile") != _SECCOMP:
            yield "seccompProfile: must be RuntimeDefault"
        # The job that makes the folders must be root, and is nothing else.
        if at(pod, "securityContext", "runAsNonRoot") is not True and thing["kind"] != "Job":
            yield "runAsNonRoot: must be true"
        if at(pod, "securityContext", "runAsUser") == 0 and thing["kind"] != "Job":
            yield "runAsUser: must not be root"
        if any(
            "serviceAccountToken" in s
            for v in entries(pod, "volumes")
            for s in entries(v, "projected", "sources")
        ):
            yield "serviceAccountToken: the pod can call the Kubernetes API"
        if pod.get("ephemeralContainers"):
            yield "ephemeralContainers: nobody debugs a pod that is not there yet"
        if shared := {"hostNetwork", "hostPID", "hostIPC"} & {key for key, value in pod.items() if value}:
            yield f"{', '.join(sorted(shared))}: the pod would see the node's own"
        if any("hostPath" in volume for volume in entries(pod, "volumes")):
            yield "hostPath: the pod would see the node's files"
        for entry in (*entries(pod, "containers"), *entries(pod, "initContainers")):
            yield from _rights(entry, thing["kind"])
            yield from _secrets(entry)


def _rights(entry: Object, kind: str) -> Iterator[str]:
    rights, name = mapping(entry, "securityContext"), entry.get("name")
    gained = rights.get("allowPrivilegeEscalation") is not False or rights.get("privileged")
    if at(rights, "capabilities", "drop") != ["ALL"] or gained:
        yield f"{name}: all capabilities must be dropped, and none be gained"
    if (added := at(rights, "capabilities", "add")) and (kind, added) != ("Job", ["CHOWN"]):
        yield f"{name}: capabilities {added} are not needed"
    if kind != "Job" and (rights.get("runAsUser") == 0 or rights.get("runAsNonRoot") is False):
        yield f"{name}: runAsUser: must not be root"
    if rights.get("seccompProfile", _SECCOMP) != _SECCOMP:
        yield f"{name}: seccompProfile: must be RuntimeDefault"
    if any("hostPort" in port for port in entries(entry, "ports")):
        yield f"{name}: hostPort: opens a port of the node, past every policy"
    if not rights.get("readOnlyRootFilesystem"):
        yield f"{name}: readOnlyRootFilesystem must be true"


def _secrets(entry: Object) -> Iterator[str]:
    for variable in entries(entry, "env"):
        secret = re.search("TOKEN|SECRET|PASSWORD|_KEY", str(variable.get("name")))
        from_secret = "secretKeyRef" in mapping(variable, "valueFrom")
        if (secret and variable.get("name") != "HF_TOKEN_PATH") or from_secret:
            yield f"{variable.get('name')}: mount a secret as a file; the dashboard shows the environment"
    if entry.get("envFrom"):
        yield "envFrom: name each variable"


def account_problems(thing: Object) -> Iterator[str]:
    """A service account whose pods would get a token unless they refuse it."""
    if thing.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken: must be false"


def service_problems(thing: Object) -> Iterator[str]:
    """A service that is reached from outside of the cluster: what is behind it has no login."""
    head = mapping(thing, "spec", *CLUSTER.get(thing["kind"], ()), "headGroupSpec")
    kind = head.get("serviceType", "ClusterIP") if thing["kind"] in RAY else at(thing, "spec", "type")
    if kind not in (None, "ClusterIP"):
        yield f"{kind}: a service that is reached from outside, and has no login; must be ClusterIP"
    if head.get("enableIngress"):
        yield "enableIngress: the dashboard runs code for whoever reaches it from outside"
    if mapping(thing, "spec").get("externalIPs"):
        yield "externalIPs: the service would be reached from outside, and has no login"


def access_problems(thing: Object) -> Iterator[str]:
    """What the endpoint operator reads."""
    notes = mapping(thing, "metadata", "annotations")
    if notes.get(f"{ACCESS}/enabled") != "true":
        yield f"{ACCESS}/enabled: must be the text true"
    if notes.get(f"{ACCESS}/access-strategy") not in STRATEGIES:
        yield f"{ACCESS}/access-strategy: {notes.get(f'{ACCESS}/access-strategy')!r}; allowed: {STRATEGIES}"


def network_problems(thing: Object) -> Iterator[str]:
    """A door to Ray's ports, where whoever comes in can run code, open to more than those of `DOORS`."""
    spec = mapping(thing, "spec")
    if spec.get("policyTypes") != ["Ingress"]:
        yield "policyTypes: must be [Ingress]"
    if not mapping(spec, "podSelector"):
        yield "podSelector: must choose the pods of a run, or the policy is that of every pod"
    for rule in entries(spec, "ingress"):
        ports = {port.get("port") for port in entries(rule, "ports")}
        if any("endPort" in port for port in entries(rule, "ports")):
            yield "ingress: endPort: name each port"
        if not entries(rule, "from"):
            yield "ingress: a rule that lets everyone in"
        for peer in entries(rule, "from"):
            yield from _peer_problems(peer, ports)


def _peer_problems(peer: Object, ports: set[object]) -> Iterator[str]:
    if "ipBlock" in peer:
        yield f"ingress: addresses {at(peer, 'ipBlock', 'cidr')} are let in; name pods instead"
    elif "namespaceSelector" in peer:
        labels = mapping(peer, "namespaceSelector", "matchLabels")
        pods = mapping(peer, "podSelector", "matchLabels")
        door = DOORS.get(str(labels.get(_NAMESPACE)))
        if door is None and pods.get(_NAME) == KUBERAY and _NAMESPACE in labels:
            door = DASHBOARD_PORT  # an operator that was there before, in another namespace
        if not labels:
            yield "ingress: all namespaces are let in"
        elif door is None:
            yield f"ingress: the namespace {labels} is let in; only {sorted(DOORS)} have a reason"
        elif ports != {door}:
            yield f"ingress: {labels[_NAMESPACE]} is let in on {_said(ports)}, and needs {door}"
    elif not mapping(peer, "podSelector", "matchLabels") and ports != {SERVE_PORT}:
        yield f"ingress: every pod of the namespace is let in on {_said(ports)}"


def _said(ports: set[object]) -> str:
    return ", ".join(sorted(map(str, ports))) if ports else "every port"


def policy_problems(policies: list[Object], thing: Object) -> Iterator[str]:
    """Pods that no policy chooses, and endpoints that the rest of the namespace does not reach."""
    if thing["kind"] == "Job":  # the one that makes the folders listens nowhere
        return
    for pod in pods_of(thing):
        chosen = [policy for policy in policies if _chooses(policy, mapping(pod, "metadata", "labels"))]
        if not chosen:
            yield "has pods that no NetworkPolicy chooses: every pod of the cluster reaches them"
        elif _serves(pod) and not any(map(_lets_the_namespace_in, chosen)):
            yield f"serves on {SERVE_PORT}, where no NetworkPolicy lets the namespace in: requests hang"


def _chooses(policy: Object, labels: Object) -> bool:
    """Whether a policy is about pods with these labels; of expressions it knows `In`."""
    selector = mapping(policy, "spec", "podSelector")
    wanted, terms = mapping(selector, "matchLabels"), entries(selector, "matchExpressions")
    return (
        bool(wanted or terms)
        and wanted.items() <= labels.items()
        and all(
            term.get("operator") == "In"
            and isinstance(values := term.get("values"), list)
            and labels.get(str(term.get("key"))) in values
            for term in terms
        )
    )


def _serves(pod: Object) -> bool:
    ports = [port for entry in entries(pod, "spec", "containers") for port in entries(entry, "ports")]
    return any(port.get("containerPort") == SERVE_PORT for port in ports)


def _lets_the_namespace_in(policy: Object) -> bool:
    return any(
        any(port.get("port") == SERVE_PORT for port in entries(rule, "ports"))
        and any(peer == {"podSelector": {}} for peer in entries(rule, "from"))
        for rule in entries(policy, "spec", "ingress")
    )
