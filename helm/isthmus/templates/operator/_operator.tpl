{{/* What the operator does in every name space with clusters. */}}
{{- define "isthmus.operatorRules" -}}
- {apiGroups: [isthmus.dev], resources: [isthmusclusters], verbs: [get, list, watch, patch]}
- {apiGroups: [isthmus.dev], resources: [isthmusclusters/status], verbs: [patch]}
- {apiGroups: [autoscaling.isthmus.dev], resources: [poolautoscalingpolicies], verbs: [list, watch]}
- {apiGroups: [apps], resources: [deployments], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [""], resources: [configmaps], verbs: [list, create, patch, delete]}
- {apiGroups: [""], resources: [services], verbs: [list, create, patch]}
- {apiGroups: [""], resources: [pods], verbs: [list]}
- {apiGroups: [policy], resources: [poddisruptionbudgets], verbs: [list, create, patch]}
- {apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [list, create, patch, delete]}
{{- end -}}

{{/* Names of Deployments that the operator makes are longer by 29 characters than the cluster's. */}}
{{- define "isthmus.clusterName" -}}
{{- include "isthmus.fullname" . | trunc 34 | trimSuffix "-" -}}
{{- end -}}

{{/* {root, component, values}: pods of one kind, as an IsthmusCluster has them. */}}
{{- define "isthmus.clusterPods" -}}
{{- $c := include "isthmus.component" . | fromJson -}}
{{- range list "podAnnotations" "podLabels" "topologySpreadConstraints" "schedulerName" "extraEnvFrom" "extraVolumes" "extraVolumeMounts" "extraArgs" "initContainers" "sidecars" -}}
{{- if get $c . }}{{ fail (printf "cluster.create: an IsthmusCluster has no %s (%s)" . $.component) }}{{ end -}}
{{- end -}}
{{- $image := $c.image -}}
{{- with .root.Values.global.imageRegistry }}{{ $_ := set $image "registry" . }}{{ end -}}
{{- if not $image.tag }}{{ $_ := set $image "tag" .root.Chart.AppVersion }}{{ end -}}
{{- $pods := dict "image" $image "drainSeconds" ($c.drainSeconds | int) "preStopSeconds" ($c.preStopSeconds | int) "terminationGracePeriodSeconds" (include "isthmus.graceSeconds" (dict "component" .component "c" $c) | int) -}}
{{- range list "tmpSize" "resources" "strategy" "extraEnv" "nodeSelector" "tolerations" "affinity" "spreadOverNodes" "priorityClassName" "runtimeClassName" "probes" "config" -}}
{{- $_ := set $pods . (get $c .) -}}
{{- end -}}
{{- $_ := set $pods "replicas" (max 1 ($c.replicas | int)) -}}
{{- toJson $pods -}}
{{- end -}}

{{/* {root, component, values}: the same of a pool, whose typed values are settings. */}}
{{- define "isthmus.clusterPool" -}}
{{- $pods := include "isthmus.clusterPods" . | fromJson -}}
{{- if .values.dra.enabled }}{{ fail (printf "cluster.create: an IsthmusCluster has no dra (pools.%s)" .component) }}{{ end -}}
{{- $worker := pick ((include "isthmus.workerConfig" . | fromJson).worker) "device" "dtype" "threads" "num_blocks" "kv_memory_bytes" -}}
{{- $_ := set $pods "config" (mergeOverwrite (dict "worker" $worker) (deepCopy .values.config)) -}}
{{- $_ := set $pods "shmSize" .values.shmSize -}}
{{- $_ := set $pods "resources" (mergeOverwrite $pods.resources (dict "limits" (include "isthmus.devices" . | fromJson))) -}}
{{- toJson $pods -}}
{{- end -}}

{{/* Labels of every pod the operator makes for the cluster. */}}
{{- define "isthmus.clusterLabels" -}}
app.kubernetes.io/instance: {{ include "isthmus.clusterName" . }}
app.kubernetes.io/managed-by: isthmus-operator
{{- end -}}
