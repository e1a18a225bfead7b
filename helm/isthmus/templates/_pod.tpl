{{/* The one pod of all components. */}}

{{/* {component, c}: grace period, which always has room for the wait before SIGTERM, the drain and the end. */}}
{{- define "isthmus.graceSeconds" -}}
{{- $least := addf .c.preStopSeconds .c.drainSeconds 5.0 -}}
{{- if kindIs "invalid" .c.terminationGracePeriodSeconds -}}
{{- addf $least 10.0 | ceil | int64 -}}
{{- else -}}
{{- if le (.c.terminationGracePeriodSeconds | float64) $least -}}
{{- fail (printf "%s: terminationGracePeriodSeconds %v is not more than preStopSeconds %v + drainSeconds %v + 5: the process would be killed while it drains" .component .c.terminationGracePeriodSeconds .c.preStopSeconds .c.drainSeconds) -}}
{{- end -}}
{{- .c.terminationGracePeriodSeconds | int64 -}}
{{- end -}}
{{- end -}}

{{/* {root, component, c, accelerated}: how Pods are replaced. An accelerator is rarely free twice. */}}
{{- define "isthmus.strategy" -}}
{{- if .c.strategy -}}{{ toYaml .c.strategy }}
{{- else if .accelerated -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 0, maxUnavailable: 1}
{{- else -}}
type: RollingUpdate
rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
{{- end -}}
{{- end -}}

{{/* Secrets and ConfigMaps of a component, or of another one (filesOf). Their modes let the group read. */}}
{{- define "isthmus.files" -}}
{{- $v := .root.Values -}}
{{- $files := list -}}
{{- $component := .filesOf | default .component -}}
{{- $isWorker := has $component (list "prefill" "decode" "ray") -}}
{{- if eq $component "router" -}}
{{- if $v.auth.existingSecret }}{{ $files = append $files (dict "name" "keys" "secret" $v.auth.existingSecret) }}{{ end -}}
{{- if $v.auth.tenantsSecret }}{{ $files = append $files (dict "name" "tenants" "secret" $v.auth.tenantsSecret) }}{{ end -}}
{{- if $v.auth.jwt.existingConfigMap }}{{ $files = append $files (dict "name" "jwks" "configMap" $v.auth.jwt.existingConfigMap) }}{{ end -}}
{{- if ne $v.tls.mode "none" }}{{ $files = append $files (dict "name" "doors" "secret" $v.tls.doorsSecret) }}{{ end -}}
{{- end -}}
{{- if has $component (list "operator" "redis") -}}
{{- /* The one talks to nobody but the API server, the other to nobody. */ -}}
{{- else -}}
{{- if ne $v.tls.mode "none" }}{{ $files = append $files (dict "name" "cluster" "secret" (ternary $v.tls.workerSecret $v.tls.routerSecret $isWorker)) }}{{ end -}}
{{- if $isWorker -}}
{{- if $v.transfer.existingSecret }}{{ $files = append $files (dict "name" "kv" "secret" $v.transfer.existingSecret) }}{{ end -}}
{{- if $v.auth.metricsTokenSecret }}{{ $files = append $files (dict "name" "metrics" "secret" $v.auth.metricsTokenSecret) }}{{ end -}}
{{- end -}}
{{- with include "isthmus.storeCaKey" .root }}{{ $files = append $files (dict "name" "store" "secret" $v.redis.external.existingSecret "items" (list (dict "key" . "path" "ca.crt"))) }}{{ end -}}
{{- end -}}
{{- toJson (dict "files" $files) -}}
{{- end -}}

{{- define "isthmus.volumes" -}}
{{- $v := .root.Values -}}
- name: config
  configMap: {name: {{ .configMap | default (include "isthmus.componentName" .) }}}
- name: tmp
  emptyDir: {sizeLimit: {{ .c.tmpSize | quote }}}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- with .c.shmSize }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . | quote }}}
{{- end }}
{{- with $v.model.volume }}
{{- if eq .type "emptyDir" }}
- name: models
  emptyDir: {sizeLimit: {{ .size | quote }}}
{{- else if eq .type "existingClaim" }}
- name: models
  persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}, readOnly: {{ .readOnly }}}
{{- else if eq .type "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "isthmus.fullname" $.root }}-models, readOnly: {{ .readOnly }}}
{{- else if eq .type "image" }}
- name: models
  image: {reference: {{ .imageReference | quote }}, pullPolicy: IfNotPresent}
{{- end }}
{{- end }}
{{- range (include "isthmus.files" . | fromJson).files }}
- name: {{ .name }}
{{- if .secret }}
  secret:
    secretName: {{ .secret | quote }}
    defaultMode: 288
    {{- with .items }}
    items: {{ toYaml . | nindent 6 }}
    {{- end }}
{{- else }}
  configMap: {name: {{ .configMap | quote }}, defaultMode: 288}
{{- end }}
{{- end }}
{{- end -}}

{{- define "isthmus.volumeMounts" -}}
{{- $v := .root.Values -}}
- {name: config, mountPath: /etc/isthmus, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: run, mountPath: /run/isthmus}
{{- if .c.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if ne $v.model.volume.type "none" }}
- {name: models, mountPath: /models, readOnly: {{ and $v.model.volume.readOnly (ne $v.model.volume.type "emptyDir") }}}
{{- end }}
{{- range (include "isthmus.files" . | fromJson).files }}
- {name: {{ .name }}, mountPath: /etc/isthmus-secrets/{{ .name }}, readOnly: true}
{{- end }}
{{- end -}}

{{/* Wait before SIGTERM. The `sleep` action of Kubernetes came after 1.29. */}}
{{- define "isthmus.lifecycle" -}}
{{- if gt (.c.preStopSeconds | float64) 0.0 }}
lifecycle:
  preStop: {exec: {command: [sleep, {{ .c.preStopSeconds | toString | quote }}]}}
{{- end }}
{{- end -}}

{{/* {root, component, c, command?, args, ports, env?, probes?, resources?, securityContext?, mounts?}: the main container. */}}
{{- define "isthmus.container" -}}
- name: {{ .containerName | default .component }}
  image: {{ include "isthmus.image" (dict "root" .root "image" .c.image) | quote }}
  imagePullPolicy: {{ .c.image.pullPolicy }}
  {{- with .command }}
  command: {{ toJson . }}
  {{- end }}
  {{- with concat (.args | default list) (.c.extraArgs | default list) }}
  args:
    {{- range . }}
    - {{ . | toString | quote }}
    {{- end }}
  {{- end }}
  {{- with .ports }}
  ports:
    {{- range . }}
    - {name: {{ .name }}, containerPort: {{ .port | int }}}
    {{- end }}
  {{- end }}
  {{- if or .env .c.extraEnv }}
  env:
    {{- with .env }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .c.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with .c.extraEnvFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .probes }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- include "isthmus.lifecycle" . | nindent 2 }}
  resources: {{ .resources | default .c.resources | toYaml | nindent 4 }}
  securityContext: {{ .securityContext | default .c.securityContext | toYaml | nindent 4 }}
  volumeMounts:
    {{- .mounts | default (include "isthmus.volumeMounts" .) | nindent 4 }}
    {{- with .c.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* What is the same in the pod of every component. {root, component, c, container, checksum?, automount?, claims?, hostNetwork?, volumes?} */}}
{{- define "isthmus.podTemplate" -}}
metadata:
  labels:
    {{- /* Without the chart's version: a new chart alone replaces no pod. */}}
    {{- mergeOverwrite (deepCopy .c.podLabels) (.podLabels | default dict) (omit (include "isthmus.labels" . | fromYaml) "helm.sh/chart") | toYaml | nindent 4 }}
  annotations:
    {{- with .checksum }}
    checksum/config: {{ . }}
    {{- end }}
    checksum/secret: {{ printf "%s %s" (include "isthmus.files" .) .root.Values.secretsRevision | sha256sum }}
    {{- with mergeOverwrite (deepCopy .root.Values.commonAnnotations) (deepCopy .c.podAnnotations) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .serviceAccountName | default (include "isthmus.serviceAccountName" .) }}
  automountServiceAccountToken: {{ .automount | default false }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "isthmus.graceSeconds" . }}
  {{- with .root.Values.global.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{ toYaml .c.podSecurityContext | nindent 4 }}
  {{- if .hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with get $.c $key }}
  {{ $key }}: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- with .c.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .c.tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "isthmus.affinity" . | fromYaml }}
  affinity: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "isthmus.spread" . }}
  topologySpreadConstraints: {{ . | nindent 4 }}
  {{- end }}
  {{- with .claims }}
  resourceClaims: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .c.initContainers }}
  initContainers: {{ tpl (toYaml .) $.root | nindent 4 }}
  {{- end }}
  containers:
    {{- .container | nindent 4 }}
    {{- with .c.sidecars }}
    {{- tpl (toYaml .) $.root | nindent 4 }}
    {{- end }}
  volumes:
    {{- .volumes | default (include "isthmus.volumes" .) | nindent 4 }}
    {{- with .c.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Both pools near one another, where a key is given; affinity of one's own is merged over it. */}}
{{- define "isthmus.affinity" -}}
{{- $affinity := dict -}}
{{- $key := .root.Values.pools.sameTopologyKey -}}
{{- if and $key (has .component (list "prefill" "decode")) -}}
{{- $labels := omit (include "isthmus.selectorLabels" . | fromYaml) "app.kubernetes.io/component" -}}
{{- $term := dict "topologyKey" $key "labelSelector" (dict "matchLabels" $labels "matchExpressions" (list (dict "key" "isthmus.dev/pool" "operator" "Exists"))) -}}
{{- $affinity = dict "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 50 "podAffinityTerm" $term))) -}}
{{- end -}}
{{- mergeOverwrite $affinity (deepCopy .c.affinity) | toYaml -}}
{{- end -}}

{{- define "isthmus.spread" -}}
{{- $selector := dict "matchLabels" (include "isthmus.selectorLabels" . | fromYaml) -}}
{{- $constraints := list -}}
{{- range .c.topologySpreadConstraints }}{{ $constraints = append $constraints (merge (deepCopy .) (dict "labelSelector" $selector)) }}{{ end -}}
{{- if and (not $constraints) .c.spreadOverNodes -}}
{{- $constraints = list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" $selector) -}}
{{- end -}}
{{- with $constraints }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* {c, startup, readiness, liveness}: the actions as mappings, the numbers from values. */}}
{{- define "isthmus.probes" -}}
startupProbe: {{ mergeOverwrite (deepCopy .c.probes.startup) .startup | toYaml | nindent 2 }}
readinessProbe: {{ mergeOverwrite (deepCopy .c.probes.readiness) .readiness | toYaml | nindent 2 }}
livenessProbe: {{ mergeOverwrite (deepCopy .c.probes.liveness) .liveness | toYaml | nindent 2 }}
{{- end -}}

{{/* {root, component, values}: ConfigMap of a component, and its checksum for the pod. */}}
{{- define "isthmus.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
data:
  isthmus.yaml: |
    {{- include "isthmus.config" . | nindent 4 }}
{{- end -}}

{{/* {root, component, c, automount} */}}
{{- define "isthmus.serviceAccount" -}}
{{- if .c.serviceAccount.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "isthmus.metadata" (mergeOverwrite (dict "name" (include "isthmus.serviceAccountName" .) "annotations" .c.serviceAccount.annotations) .) | nindent 2 }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}

{{/* {root, component, c} */}}
{{- define "isthmus.pdb" -}}
{{- if .c.pdb.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "isthmus.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .c.pdb.maxUnavailable }}
  selector:
    matchLabels: {{ include "isthmus.selectorLabels" . | nindent 6 }}
{{- end }}
{{- end -}}
