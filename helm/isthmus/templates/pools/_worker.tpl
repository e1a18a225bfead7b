{{/* Both pools: one pod, of a Deployment or of a LeaderWorkerSet. */}}

{{/* {values, root}: limits of accelerators and RDMA devices. */}}
{{- define "isthmus.devices" -}}
{{- $limits := dict -}}
{{- $a := .values.accelerator -}}
{{- if ne $a.type "none" -}}
{{- $names := dict "nvidia" "nvidia.com/gpu" "amd" "amd.com/gpu" "intel" "gpu.intel.com/i915" "tpu" "google.com/tpu" -}}
{{- $name := $a.resourceName | default (ternary (printf "nvidia.com/mig-%s" $a.mig) (get $names $a.type) (ne $a.mig "")) -}}
{{- $_ := set $limits $name ($a.count | int | toString) -}}
{{- end -}}
{{- with .root.Values.transfer.rdma -}}
{{- if .enabled }}{{ $_ := set $limits .resourceName (.count | int | toString) }}{{ end -}}
{{- end -}}
{{- toJson $limits -}}
{{- end -}}

{{/* {root, component, c, values}: the pod of a pool. */}}
{{- define "isthmus.workerPod" -}}
{{- $v := .root.Values -}}
{{- $env := include "isthmus.env" . | fromYamlArray -}}
{{- $env = concat $env (list (dict "name" "ISTHMUS_WORKER__WORKER_ID" "value" "$(POD_NAME)") (dict "name" "ISTHMUS_WORKER__BIND_HOST" "value" "$(POD_IP)")) -}}
{{- if $v.transfer.rdma.enabled -}}
{{- range $name, $value := $v.transfer.rdma.env }}{{ $env = append $env (dict "name" $name "value" ($value | toString)) }}{{ end -}}
{{- end -}}
{{- $ports := list (dict "name" "grpc" "port" $v.workerPorts.grpc) (dict "name" "transfer" "port" $v.workerPorts.transfer) (dict "name" "metrics" "port" $v.workerPorts.metrics) -}}
{{- $resources := mergeOverwrite (deepCopy .c.resources) (dict "limits" (include "isthmus.devices" . | fromJson)) -}}
{{- $claims := list -}}
{{- if .values.dra.enabled -}}
{{- $claims = list (dict "name" "devices" "resourceClaimTemplateName" (include "isthmus.componentName" .)) -}}
{{- $_ := set $resources "claims" (list (dict "name" "devices")) -}}
{{- end -}}
{{- $security := deepCopy .c.securityContext -}}
{{- if $v.transfer.rdma.enabled -}}
{{- /* Registered memory is locked; without the capability its size is limited to 64 KiB. */ -}}
{{- $_ := set $security "capabilities" (mergeOverwrite (dict) (deepCopy ($security.capabilities | default dict)) (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- $args := list "--role" .component "--config" "/etc/isthmus/isthmus.yaml" -}}
{{- $container := include "isthmus.container" (mergeOverwrite (dict "containerName" "worker" "command" (list "isthmus" "worker") "args" $args "ports" $ports "env" (toYaml $env) "probes" (include "isthmus.workerProbes" .) "resources" $resources "securityContext" $security) .) -}}
{{- $config := include "isthmus.configMap" . -}}
{{- include "isthmus.podTemplate" (mergeOverwrite (dict "container" $container "checksum" ($config | sha256sum) "claims" $claims "hostNetwork" (and $v.transfer.rdma.enabled $v.transfer.rdma.hostNetwork)) .) -}}
{{- end -}}

{{/* kubelet's gRPC probes speak no TLS: with certificates the metrics port is asked, which is plain HTTP. */}}
{{- define "isthmus.workerProbes" -}}
{{- $port := .root.Values.workerPorts.grpc | int -}}
{{- $ready := dict "grpc" (dict "port" $port "service" "readiness") -}}
{{- $live := dict "grpc" (dict "port" $port "service" "liveness") -}}
{{- if ne .root.Values.tls.mode "none" -}}
{{- $ready = dict "httpGet" (dict "path" "/ready" "port" "metrics") -}}
{{- $live = dict "httpGet" (dict "path" "/live" "port" "metrics") -}}
{{- end -}}
{{- include "isthmus.probes" (dict "c" .c "startup" $ready "readiness" $ready "liveness" $live) -}}
{{- end -}}

{{/* Whether somebody else writes the pool's size. {root, values} */}}
{{- define "isthmus.isScaled" -}}
{{- if or .root.Values.autoscaler.enabled .values.hpa.enabled .values.scaledExternally }}true{{ end -}}
{{- end -}}

{{- define "isthmus.pool" -}}
{{- $v := .root.Values -}}
{{- $accelerated := or (ne .values.accelerator.type "none") .values.dra.enabled -}}
{{ include "isthmus.configMap" . }}
---
{{- with include "isthmus.serviceAccount" . }}
{{ . }}
---
{{- end }}
{{- if eq $v.pools.kind "LeaderWorkerSet" }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
spec:
  {{- if not (include "isthmus.isScaled" .) }}
  replicas: {{ .values.replicas | int }}
  {{- end }}
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {maxUnavailable: 1, maxSurge: 0}
  leaderWorkerTemplate:
    # A replica of several hosts needs workers of several ranks, which do not exist yet.
    size: 1
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      {{- include "isthmus.workerPod" . | nindent 6 }}
{{- else }}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
spec:
  {{- if not (include "isthmus.isScaled" .) }}
  replicas: {{ .values.replicas | int }}
  {{- end }}
  revisionHistoryLimit: 5
  progressDeadlineSeconds: 1800
  selector:
    matchLabels: {{- include "isthmus.selectorLabels" . | nindent 6 }}
  strategy:
    {{- include "isthmus.strategy" (dict "c" .c "accelerated" $accelerated) | nindent 4 }}
  template:
    {{- include "isthmus.workerPod" . | nindent 4 }}
{{- end }}
---
{{- /* Routers find workers in the store; this gives pods names, for people and for scrapes. */}}
apiVersion: v1
kind: Service
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  selector: {{- include "isthmus.selectorLabels" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $v.workerPorts.grpc | int }}, targetPort: grpc, appProtocol: {{ ternary "grpc" "kubernetes.io/h2c" (ne $v.tls.mode "none") }}}
    - {name: metrics, port: {{ $v.workerPorts.metrics | int }}, targetPort: metrics, appProtocol: http}
{{- with include "isthmus.pdb" . }}
---
{{ . }}
{{- end }}
{{- if .values.hpa.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: {{ ternary "apps/v1" "leaderworkerset.x-k8s.io/v1" (eq $v.pools.kind "Deployment") }}
    kind: {{ $v.pools.kind }}
    name: {{ include "isthmus.componentName" . }}
  minReplicas: {{ .values.hpa.minReplicas | int }}
  maxReplicas: {{ .values.hpa.maxReplicas | int }}
  metrics: {{ toYaml .values.hpa.metrics | nindent 4 }}
{{- end }}
{{- if .values.dra.enabled }}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
spec:
  spec:
    devices:
      requests:
        - name: devices
          exactly: {deviceClassName: {{ .values.dra.deviceClassName | quote }}, allocationMode: ExactCount, count: {{ .values.dra.count | int }}}
{{- end }}
{{- end -}}
