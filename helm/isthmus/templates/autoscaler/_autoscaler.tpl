{{/* {x, env, config, policy}: the autoscaler's container, in a pod of its own or beside the head of Ray. */}}
{{- define "isthmus.autoscalerContainer" -}}
{{- $root := .x.root -}}
{{- $v := $root.Values -}}
{{- $args := list "--config" .config "--policy" .policy "--driver" $v.autoscaler.driver "--host" "$(POD_IP)" "--grpc-port" $v.autoscaler.grpcPort "--metrics-port" $v.autoscaler.metricsPort -}}
{{- if eq $v.autoscaler.driver "deployment" -}}
{{- range list "prefill" "decode" -}}
{{- $args = append $args (printf "--deployment=%s=%s" . (include "isthmus.componentName" (dict "root" $root "component" .))) -}}
{{- end -}}
{{- $args = append $args (printf "--worker-port=%d" ($v.workerPorts.grpc | int)) -}}
{{- else if eq $v.autoscaler.driver "kuberay-direct" -}}
{{- $args = append $args (printf "--ray-cluster=%s" (include "isthmus.fullname" $root)) -}}
{{- $args = concat $args (list "--group=prefill=prefill" "--group=decode=decode") -}}
{{- end -}}
{{- with $v.autoscaler.prometheusUrl }}{{ $args = append $args (printf "--prometheus=%s" .) }}{{ end -}}
{{- $health := dict "grpc" (dict "port" ($v.autoscaler.grpcPort | int)) -}}
{{- $probes := include "isthmus.probes" (dict "c" .x.c "startup" $health "readiness" $health "liveness" $health) -}}
{{- $ports := list (dict "name" "health" "port" $v.autoscaler.grpcPort) (dict "name" (ternary "metrics" "as-metrics" (not $v.ray.enabled)) "port" $v.autoscaler.metricsPort) -}}
{{- include "isthmus.container" (mergeOverwrite (dict "command" (list "isthmus" "autoscaler") "args" $args "ports" $ports "env" .env "probes" $probes) .x) -}}
{{- end -}}

{{/* The policy as a file, which is a resource as well. It names the release, or the operator's cluster. */}}
{{- define "isthmus.policy" -}}
apiVersion: autoscaling.isthmus.dev/v1alpha1
kind: PoolAutoscalingPolicy
metadata:
  {{- include "isthmus.metadata" (dict "root" . "component" "autoscaler" "name" (include "isthmus.clusterName" .)) | nindent 2 }}
spec:
  {{- mergeOverwrite (dict "clusterRef" (dict "name" (include "isthmus.clusterName" .))) (deepCopy .Values.autoscaler.policy) | toYaml | nindent 2 }}
{{- end -}}
