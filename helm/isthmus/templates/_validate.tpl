{{/* What one value alone cannot tell. Each refusal says what to do. */}}

{{- define "isthmus.validate" -}}
{{- $v := .Values -}}
{{- if not (or $v.auth.existingSecret $v.auth.jwt.existingConfigMap $v.auth.allowUnauthenticated) }}
{{- fail "auth: set auth.existingSecret or auth.jwt.existingConfigMap, or auth.allowUnauthenticated: true" }}
{{- end }}
{{- if and $v.auth.jwt.existingConfigMap (not (and $v.auth.jwt.issuer $v.auth.jwt.audience)) }}
{{- fail "auth.jwt: issuer and audience are needed" }}
{{- end }}
{{- if not (or $v.auth.metricsTokenSecret $v.auth.allowUnauthenticated) }}
{{- fail "auth.metricsTokenSecret is needed unless auth.allowUnauthenticated is true" }}
{{- end }}
{{- if and (eq $v.tls.mode "none") (not $v.auth.allowPlaintext) }}
{{- fail "tls.mode: none takes auth.allowPlaintext: true" }}
{{- end }}
{{- if and (eq $v.tls.mode "certManager") (not $v.tls.certManager.issuerRef.name) }}
{{- fail "tls.certManager.issuerRef.name is needed" }}
{{- end }}
{{- if not (or $v.transfer.existingSecret $v.transfer.allowPlaintextKv) }}
{{- fail "transfer.existingSecret is needed unless transfer.allowPlaintextKv is true" }}
{{- end }}
{{- if eq $v.redis.external.enabled $v.redis.bundled.enabled }}
{{- fail "redis: enable exactly one of redis.external and redis.bundled" }}
{{- end }}
{{- if and (eq $v.model.volume.type "existingClaim") (not $v.model.volume.existingClaim) }}
{{- fail "model.volume.existingClaim is needed" }}
{{- end }}
{{- if and (eq $v.model.volume.type "image") (not $v.model.volume.imageReference) }}
{{- fail "model.volume.imageReference is needed" }}
{{- end }}
{{- range $name := list "prefill" "decode" }}
{{- $pool := get $v.pools $name }}
{{- if gt (len (compact (list (ternary "autoscaler" "" $v.autoscaler.enabled) (ternary "hpa" "" $pool.hpa.enabled) (ternary "scaledExternally" "" $pool.scaledExternally)))) 1 }}
{{- fail (printf "pools.%s: only one of autoscaler, hpa and scaledExternally may size it" $name) }}
{{- end }}
{{- if and $pool.hpa.enabled (not $pool.hpa.metrics) }}
{{- fail (printf "pools.%s.hpa.metrics is needed" $name) }}
{{- end }}
{{- if and $pool.dra.enabled (ne $pool.accelerator.type "none") }}
{{- fail (printf "pools.%s: take devices by dra or by accelerator, not by both" $name) }}
{{- end }}
{{- if and $pool.accelerator.mig (ne $pool.accelerator.type "nvidia") }}
{{- fail (printf "pools.%s.accelerator.mig is for type nvidia" $name) }}
{{- end }}
{{- if and $v.ray.enabled $pool.hpa.enabled }}
{{- fail (printf "pools.%s.hpa: pools of Ray are sized by the autoscaler" $name) }}
{{- end }}
{{- end }}
{{- if $v.autoscaler.enabled }}
{{- if not $v.autoscaler.policy }}
{{- fail "autoscaler.policy is needed: `isthmus policy example` prints one" }}
{{- end }}
{{- if ne (eq $v.autoscaler.driver "deployment") (not $v.ray.enabled) }}
{{- fail "autoscaler.driver: deployment without ray.enabled, kuberay or kuberay-direct with it" }}
{{- end }}
{{- if and (eq $v.autoscaler.driver "deployment") (ne $v.pools.kind "Deployment") }}
{{- fail "autoscaler.driver deployment sizes Deployments: pools.kind has to be Deployment" }}
{{- end }}
{{- end }}
{{- if $v.ray.enabled }}
{{- range list "device" "dtype" "threads" "numBlocks" "kvMemory" "drainSeconds" "config" }}
{{- if ne (toJson (get $v.pools.prefill .)) (toJson (get $v.pools.decode .)) }}
{{- fail (printf "ray.enabled: actors of both pools have one configuration, pools.prefill.%s and pools.decode.%s differ" . .) }}
{{- end }}
{{- end }}
{{- if not $v.autoscaler.enabled }}
{{- fail "ray.enabled: the autoscaler starts the actors, set autoscaler.enabled" }}
{{- end }}
{{- if ne $v.pools.kind "Deployment" }}
{{- fail "ray.enabled takes the place of pools.kind: leave that at Deployment" }}
{{- end }}
{{- end }}
{{- if and $v.cluster.create (not $v.operator.enabled) }}
{{- fail "cluster.create needs operator.enabled" }}
{{- end }}
{{- if and $v.cluster.create $v.ray.enabled }}
{{- fail "cluster.create: the operator makes Deployments, not RayClusters" }}
{{- end }}
{{- end -}}
