"""From a cluster's resource and what is there of it to what is done next. Pure.

Pods of one model (and of one form of KV) are a revision: routers and both pools, side by side with
those of other revisions. The Service selects the routers of one of them, the active one; a router
finds only workers whose weights have its own digest. So another model gets a whole revision of its
own, all requests at once when all of it serves, and the old one ends when its requests have: no
request ever meets two digests. Everything else is changed in place, by the Deployments.

Sizes are never part of what is applied, so that whoever scales a pool has no rival: they are
patched where the resource fixes them, and once where a policy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.operator import resources
from services.operator.cluster import (
    MAX_NAME_CHARS,
    ClusterSpec,
    ClusterStatus,
    Rollout,
    SpecFaults,
    parse_spec,
    parse_status,
)
from services.operator.configuration import configuration_faults, kv_form
from services.operator.drift import digest_of, has_drifted, stamped
from services.operator.observed import (
    DECODE,
    PREFILL,
    RETIRED,
    REVISION_LABEL,
    ROUTER,
    SERVING,
    SIZED,
    Observed,
    Resource,
    Workload,
    read_time,
    tell_time,
)
from services.operator.plan import FINALIZER, Action, Apply, Delete, Finalize, Patch, Plan
from services.operator.pods import pods_of
from services.operator.telling import Facts, told

_LOOK_AGAIN_S = 3.0  # while something is under way


@dataclass(frozen=True, slots=True)
class Cluster:
    """One IsthmusCluster as it was read."""

    name: str
    uid: str
    generation: int
    values: Resource  # its spec
    status: ClusterStatus
    finalizers: tuple[str, ...] = ()
    deleted_at_s: float | None = None


def read_cluster(resource: Resource) -> Cluster:
    """Read the resource."""
    metadata = resource["metadata"]
    return Cluster(
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata["generation"]),
        values=resource.get("spec") or {},
        status=parse_status(resource.get("status")),
        finalizers=tuple(metadata.get("finalizers") or ()),
        deleted_at_s=read_time(metadata.get("deletionTimestamp")),
    )


def reconcile(cluster: Cluster, observed: Observed, now_s: float) -> Plan:
    """Decide one pass. `now_s` is Unix time; the same state gives the same plan."""
    if cluster.deleted_at_s is not None:
        return _deletion(cluster, observed, now_s)
    try:
        spec = checked_spec(cluster)
    except SpecFaults as faults:
        return Plan(status=told(replace(_facts(cluster, observed), spec_fault=str(faults)), now_s))
    if FINALIZER not in cluster.finalizers:
        wanted = Finalize(is_wanted=True, reason="requests are let finish before it is removed")
        return Plan((wanted,), cluster.status, requeue_after_s=0.0)
    return _Pass(cluster, spec, observed, now_s).plan()


def checked_spec(cluster: Cluster) -> ClusterSpec:
    """Read the spec and judge it as a whole; raises SpecFaults."""
    if len(cluster.name) > MAX_NAME_CHARS:
        raise SpecFaults((f"metadata.name: more than {MAX_NAME_CHARS} characters",))
    spec = parse_spec(cluster.values)
    faults = tuple(configuration_faults(spec))
    if faults:
        raise SpecFaults(faults)
    return spec


def revision_of(spec: ClusterSpec) -> str:
    """Name what pods have to share to hand KV over to one another."""
    model = spec.model
    return digest_of(
        [model.name, model.weights_digest, model.volume.model_dump(mode="json"), kv_form(spec)], 8
    )


def active_revision(cluster: Cluster, observed: Observed) -> str:
    """Return whose routers get the requests; "" = nobody's yet.

    The Service itself tells. Where it was removed by others the status remembers.
    """
    service = observed.resources.get(("Service", resources.front_name(cluster.name)))
    selector = ((service or {}).get("spec") or {}).get("selector") or {}
    return str(selector.get(REVISION_LABEL) or cluster.status.active_revision)


class _Pass:
    """One pass over a cluster that is to be there."""

    def __init__(
        self, cluster: Cluster, spec: ClusterSpec, observed: Observed, now_s: float
    ) -> None:
        self.cluster, self.spec, self.observed, self.now_s = cluster, spec, observed, now_s
        self.target = revision_of(spec)
        self.active = active_revision(cluster, observed) or self.target
        self.policy = next((p for p in observed.policies if not p.fault), None)
        self.owner = resources.Owner(cluster.name, cluster.uid)
        self.started_s = self._started()
        self.has_failed = (
            self.active != self.target and cluster.status.failed_generation == cluster.generation
        )

    def plan(self) -> Plan:
        """Decide: what is shared, the target, who gets the requests, and who has to go."""
        actions = list(self._applied(resources.shared(self.owner, self.spec), "not as specified"))
        if not self.spec.network_policy.enabled:
            names = resources.network_policy_names(self.cluster.name)
            actions += self._deleted(names, "networkPolicy.enabled is false")
        why = self._why_given_up()
        if why:
            self.has_failed = True
        if not self.has_failed:
            actions += self._target()
        was_active, is_new = self.active, not self._front_is_there()
        if not self.has_failed and (self.active == self.target or self._target_serves()):
            self.active = self.target
        if self.active == self.target:
            reason = "first revision" if is_new else f"all of it serves, instead of {was_active}"
            front = resources.front(self.owner, self.spec, self.active)
            actions += self._applied([front], reason)
        actions += self._autoscaler()
        actions += self._retired()
        facts = replace(
            _facts(self.cluster, self.observed),
            active=self.active,
            target=self.target,
            started_s=self.started_s,
            failed=why or (self._told_failure() if self.has_failed else ""),
            is_changing=bool(actions),
            policy_fault=self._policy_fault(),
        )
        status = told(facts, self.now_s)
        busy = bool(actions) or self._is_under_way()
        return Plan(tuple(actions), status, _LOOK_AGAIN_S if busy else None)

    def _started(self) -> float | None:
        """Return when the target became the target; None = it is what serves."""
        if self.active == self.target and self._front_is_there() and self._target_serves():
            return None
        status = self.cluster.status
        known = read_time(status.rollout_started_at)
        if status.target_revision == self.target and known is not None:
            is_same = status.observed_generation == self.cluster.generation
            # An edit begins anew: it may be what mends it.
            return known if is_same else self.now_s
        return self.now_s

    def _why_given_up(self) -> str:
        """Say why the target is given up for what serves; "" = it is not."""
        if self.active == self.target or self.has_failed or self._target_serves():
            return ""
        if self.active not in self.observed.revisions:
            return ""  # there is nothing to go back to
        for fault in self.observed.faults:
            if fault.revision == self.target and fault.is_hopeless:
                return fault.message
        deadline_s = self.spec.rollout.progress_deadline_seconds
        if self.started_s is not None and self.now_s - self.started_s >= deadline_s:
            faults = [f.message for f in self.observed.faults if f.revision == self.target]
            return f"did not serve within {deadline_s} s" + (f": {faults[0]}" if faults else "")
        return ""

    def _target(self) -> Iterator[Action]:
        yield from self._applied(
            resources.revision(self.owner, self.spec, self.target), "not as specified"
        )
        there = self.observed.of(self.target)
        for component, workload in there.items():
            wanted = self._size(component, workload)
            is_back = workload.retired_at_s is not None
            if wanted is not None and (wanted != workload.replicas or not workload.is_sized):
                reason = f"{workload.replicas} -> {wanted}"
            elif is_back:
                reason = "is wanted again"
            else:
                continue
            marks = {SIZED: "true", RETIRED: None}
            size = workload.replicas if wanted is None else wanted
            body = {"metadata": {"annotations": marks}, "spec": {"replicas": size}}
            yield Patch(workload.name, body, reason)

    def _size(self, component: str, workload: Workload) -> int | None:
        """Return the size we set; None = somebody else's."""
        fixed = pods_of(self.spec, component).replicas
        if self.policy is None or component not in self.policy.pools:
            return fixed
        if self.active != self.target:
            # Whoever gets the requests has been sized by them.
            serving = self.observed.of(self.active).get(component)
            least = 1 if serving is None else serving.replicas
            own = workload.replicas if workload.is_sized and workload.retired_at_s is None else 1
            return max(least, own, 1)
        if workload.is_sized and workload.retired_at_s is None:
            return None
        return max(1, self.policy.sizes.get(component, fixed))

    def _target_serves(self) -> bool:
        """Whether all of the target is there, as specified, and serves."""
        there = self.observed.of(self.target)
        return all(
            (w := there.get(component)) is not None
            and w.retired_at_s is None
            and w.is_sized
            and w.is_settled
            and w.ready >= w.replicas >= self._least(component, w)
            for component in SERVING
        )

    def _least(self, component: str, workload: Workload) -> int:
        wanted = self._size(component, workload)
        return 0 if wanted is None else wanted

    def _front_is_there(self) -> bool:
        return ("Service", resources.front_name(self.cluster.name)) in self.observed.resources

    def _autoscaler(self) -> Iterator[Action]:
        names = resources.autoscaler_names(self.cluster.name)
        if self.policy is None:
            yield from self._deleted(names, "no policy names this cluster")
            return
        config, deployment = resources.autoscaler(self.owner, self.spec, self.policy, self.active)
        yield from self._applied([config], "the policy has changed")
        if self.active == self.target:  # else its model is not the one of this spec
            yield from self._applied([deployment], "not as specified")

    def _retired(self) -> Iterator[Action]:
        """Have all other revisions end: routers first, so that no request loses its workers."""
        kept = {self.active} if self.has_failed else {self.active, self.target}
        for revision in self.observed.revisions:
            if revision in kept:
                continue
            deadline_s = float(self.spec.rollout.drain_deadline_seconds)
            yield from _emptied(self.observed, revision, deadline_s, self.now_s)
            if _is_empty(self.observed, revision, deadline_s, self.now_s):
                names = resources.revision_names(self.cluster.name, revision)
                yield from self._deleted(names, f"{revision} serves nothing any more")

    def _deleted(self, names: list[tuple[str, str]], reason: str) -> Iterator[Action]:
        for kind, name in names:
            if (kind, name) in self.observed.resources:
                yield Delete(kind, name, reason)

    def _applied(self, wanted: list[Resource], reason: str) -> Iterator[Action]:
        for resource in map(stamped, wanted):
            seen = self.observed.resources.get((resource["kind"], resource["metadata"]["name"]))
            if has_drifted(resource, seen):
                yield Apply(resource, "is not there" if seen is None else reason)

    def _is_under_way(self) -> bool:
        """Whether anything is awaited."""
        own = self.observed.of(self.target).values()
        others = [r for r in self.observed.revisions if r != self.active]
        return bool(others) or not all(w.is_settled and w.ready >= w.replicas for w in own)

    def _told_failure(self) -> str:
        """Return why it was given up, as it was told then."""
        known = (c.message for c in self.cluster.status.conditions if c.type == "Degraded")
        return next(known, "") or "was given up before"

    def _policy_fault(self) -> str:
        faults = [f"{p.name}: {p.fault}" for p in self.observed.policies if p.fault]
        return "; ".join(faults)


def _deletion(cluster: Cluster, observed: Observed, now_s: float) -> Plan:
    """Have everything end, and let the resource go; what is left is removed with it."""
    if FINALIZER not in cluster.finalizers:
        return Plan(status=cluster.status)
    assert cluster.deleted_at_s is not None
    deadline_s = float(_rollout(cluster).drain_deadline_seconds)
    actions: list[Action] = [
        Delete(kind, name, "the cluster is removed")
        for kind, name in resources.autoscaler_names(cluster.name)
        if (kind, name) in observed.resources
    ]
    for revision in observed.revisions:
        actions += _emptied(observed, revision, deadline_s, now_s)
    is_over = now_s - cluster.deleted_at_s >= 2 * deadline_s
    if is_over or all(_is_empty(observed, r, deadline_s, now_s) for r in observed.revisions):
        reason = "its deadline is over" if is_over else "it serves nothing any more"
        actions.append(Finalize(is_wanted=False, reason=reason))
    status = told(_facts(cluster, observed), now_s)
    return Plan(tuple(actions), status, _LOOK_AGAIN_S)


def _emptied(
    observed: Observed, revision: str, deadline_s: float, now_s: float
) -> Iterator[Action]:
    """Have routers end, and workers when no router is left or its deadline is over."""
    there = observed.of(revision)
    router = there.get(ROUTER)
    yield from _ended(router, now_s, "requests go elsewhere")
    is_open = router is not None and (
        router.retired_at_s is None or now_s - router.retired_at_s < deadline_s
    )
    if is_open and (observed.has_pods(revision, ROUTER) or (router and router.num_pods)):
        return
    for component in (PREFILL, DECODE):
        yield from _ended(there.get(component), now_s, "no router is left")


def _ended(workload: Workload | None, now_s: float, reason: str) -> Iterator[Action]:
    if workload is None or (workload.retired_at_s is not None and not workload.replicas):
        return
    since_s = now_s if workload.retired_at_s is None else workload.retired_at_s
    marks = {RETIRED: tell_time(since_s), SIZED: None}
    body = {"metadata": {"annotations": marks}, "spec": {"replicas": 0}}
    yield Patch(workload.name, body, reason)


def _is_empty(observed: Observed, revision: str, deadline_s: float, now_s: float) -> bool:
    """Whether no pod is left, or those that are have had all the time they get."""
    for workload in observed.of(revision).values():
        if workload.retired_at_s is None:
            return False
        is_late = now_s - workload.retired_at_s >= deadline_s
        if not is_late and (workload.num_pods or observed.has_pods(revision, workload.component)):
            return False
    return True


def _rollout(cluster: Cluster) -> Rollout:
    """Return the bounds of changes, the usual ones where the spec cannot be read."""
    try:
        return parse_spec(cluster.values).rollout
    except SpecFaults:
        return Rollout()


def _facts(cluster: Cluster, observed: Observed) -> Facts:
    return Facts(
        generation=cluster.generation,
        before=cluster.status,
        observed=observed,
        is_removed=cluster.deleted_at_s is not None,
    )
