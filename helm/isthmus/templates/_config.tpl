{{/* isthmus.yaml of one component, from typed values; `config` of values wins. Never a secret. */}}

{{/* {root, component, values}: `values` are those of the component alone. */}}
{{- define "isthmus.config" -}}
{{- $v := .root.Values -}}
{{- $isWorker := has .component (list "prefill" "decode" "ray") -}}
{{- $model := dict "name" $v.model.name -}}
{{- if $v.model.servedName }}{{ $_ := set $model "served_name" $v.model.servedName }}{{ end -}}
{{- if $v.model.weightsDigest }}{{ $_ := set $model "weights_digest" $v.model.weightsDigest }}{{ end -}}
{{- if $v.model.maxModelLen }}{{ $_ := set $model "max_model_len" ($v.model.maxModelLen | int) }}{{ end -}}
{{- if ne $v.model.volume.type "none" }}{{ $_ := set $model "cache_dir" "/models" }}{{ end -}}
{{- $telemetry := dict "log_level" $v.logs.level "log_format" $v.logs.format "sample_ratio" $v.otel.sampleRatio -}}
{{- if $v.otel.endpoint }}{{ $_ := set $telemetry "otlp_endpoint" $v.otel.endpoint }}{{ end -}}
{{- $auth := dict "allow_unauthenticated" $v.auth.allowUnauthenticated "allow_plaintext" $v.auth.allowPlaintext -}}
{{- $config := dict "model" $model "telemetry" $telemetry "auth" $auth -}}
{{- if include "isthmus.storeCaKey" .root }}{{ $_ := set $config "store" (dict "ca_file" "/etc/isthmus-secrets/store/ca.crt") }}{{ end -}}
{{- $tls := dict -}}
{{- if ne $v.tls.mode "none" -}}
{{- $dir := "/etc/isthmus-secrets/cluster" -}}
{{- $tls = dict "cluster_cert_file" (printf "%s/tls.crt" $dir) "cluster_key_file" (printf "%s/tls.key" $dir) "cluster_ca_file" (printf "%s/ca.crt" $dir) -}}
{{- end -}}
{{- if eq .component "router" -}}
{{- $_ := mergeOverwrite $config (include "isthmus.routerConfig" . | fromJson) -}}
{{- if ne $v.tls.mode "none" -}}
{{- $_ := set $tls "cert_file" "/etc/isthmus-secrets/doors/tls.crt" -}}
{{- $_ := set $tls "key_file" "/etc/isthmus-secrets/doors/tls.key" -}}
{{- end -}}
{{- end -}}
{{- if $tls }}{{ $_ := set $config "tls" $tls }}{{ end -}}
{{- if $isWorker }}{{ $_ := mergeOverwrite $config (include "isthmus.workerConfig" . | fromJson) }}{{ end -}}
{{- if and $v.ray.enabled (eq .component "ray") -}}
{{- $_ := set $config "ray" (include "isthmus.rayConfig" .root | fromJson) -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy $v.config) (deepCopy (.values.config | default dict)) | toYaml -}}
{{- end -}}

{{- define "isthmus.routerConfig" -}}
{{- $v := .root.Values -}}
{{- $router := dict "grpc_port" ($v.router.grpcPort | int) "http_port" ($v.router.httpPort | int) "metrics_port" ($v.router.metricsPort | int) "drain_s" $v.router.drainSeconds -}}
{{- if gt ($v.router.processes | int) 1 }}{{ $_ := set $router "processes" ($v.router.processes | int) }}{{ end -}}
{{- with $v.router.bindHost -}}
{{- $_ := set $router "grpc_host" . -}}{{- $_ := set $router "http_host" . -}}{{- $_ := set $router "metrics_host" . -}}
{{- end -}}
{{- $auth := dict -}}
{{- if $v.auth.existingSecret -}}
{{- $auth = dict "keys_file" "/etc/isthmus-secrets/keys" "tenant_secret_file" "/etc/isthmus-secrets/keys/tenant.secret" -}}
{{- end -}}
{{- if $v.auth.tenantsSecret }}{{ $_ := set $auth "tenants_file" "/etc/isthmus-secrets/tenants/tenants.yaml" }}{{ end -}}
{{- if $v.auth.jwt.existingConfigMap -}}
{{- $_ := set $auth "jwks_file" "/etc/isthmus-secrets/jwks/jwks.json" -}}
{{- $_ := set $auth "jwt_issuer" $v.auth.jwt.issuer -}}
{{- $_ := set $auth "jwt_audience" $v.auth.jwt.audience -}}
{{- end -}}
{{- dict "router" $router "auth" $auth | toJson -}}
{{- end -}}

{{- define "isthmus.workerConfig" -}}
{{- $v := .root.Values -}}
{{- $transfer := dict "planes" $v.transfer.planes "wire_dtype" $v.transfer.wireDtype "allow_plaintext_kv" $v.transfer.allowPlaintextKv -}}
{{- if $v.transfer.existingSecret }}{{ $_ := set $transfer "curve_key_file" "/etc/isthmus-secrets/kv/cluster.keys" }}{{ end -}}
{{- $worker := dict -}}
{{- if $v.auth.metricsTokenSecret }}{{ $_ := set $worker "metrics_token_file" "/etc/isthmus-secrets/metrics/token" }}{{ end -}}
{{- $_ := set $worker "device" .values.device -}}
{{- $_ := set $worker "dtype" .values.dtype -}}
{{- $_ := set $worker "threads" (.values.threads | int) -}}
{{- $_ := set $worker "num_blocks" (.values.numBlocks | int) -}}
{{- $_ := set $worker "kv_memory_bytes" (include "isthmus.bytes" .values.kvMemory | int64) -}}
{{- $_ := set $worker "drain_s" .values.drainSeconds -}}
{{- /* An actor has its role from the driver and draws its ports: several may share a node. */ -}}
{{- if ne .component "ray" -}}
{{- $_ := set $transfer "zmq_port" ($v.workerPorts.transfer | int) -}}
{{- $_ := set $worker "role" .component -}}
{{- $_ := set $worker "grpc_port" ($v.workerPorts.grpc | int) -}}
{{- $_ := set $worker "metrics_port" ($v.workerPorts.metrics | int) -}}
{{- end -}}
{{- dict "worker" $worker "transfer" $transfer | toJson -}}
{{- end -}}

{{- define "isthmus.rayConfig" -}}
{{- $gpus := 0 -}}
{{- if ne .Values.pools.prefill.accelerator.type "none" }}{{ $gpus = .Values.pools.prefill.accelerator.count | int }}{{ end -}}
{{- dict "address" "auto" "namespace" (.Values.ray.namespace | default .Release.Name) "gpus_per_worker" $gpus | toJson -}}
{{- end -}}

{{/* A quantity of bytes (8Gi, 512Mi, 1G) as a whole number; empty = 0. */}}
{{- define "isthmus.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $text := . | toString -}}
{{- if not $text -}}0
{{- else -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $number := trimSuffix $unit $text | int64 -}}
{{- mul $number (get $units $unit | default 1 | int64) -}}
{{- end -}}
{{- end -}}

{{/* The key of the store's CA, where a store of one's own has one. */}}
{{- define "isthmus.storeCaKey" -}}
{{- if .Values.redis.external.enabled }}{{ .Values.redis.external.caKey }}{{ end -}}
{{- end -}}

{{/* Variables every process needs: who and where it is. */}}
{{- define "isthmus.podEnv" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: XDG_RUNTIME_DIR
  value: /run/isthmus
- name: HOME
  value: /tmp
{{- end -}}

{{/* And the store's address, which is a secret. */}}
{{- define "isthmus.env" -}}
{{- $v := .root.Values -}}
{{ include "isthmus.podEnv" . }}
{{- if $v.redis.external.enabled }}
- name: ISTHMUS_STORE__URL
  valueFrom: {secretKeyRef: {name: {{ $v.redis.external.existingSecret | quote }}, key: {{ $v.redis.external.urlKey | quote }}}}
{{- if $v.redis.external.loaderUrlKey }}
- name: ISTHMUS_STORE__LOADER_URL
  valueFrom: {secretKeyRef: {name: {{ $v.redis.external.existingSecret | quote }}, key: {{ $v.redis.external.loaderUrlKey | quote }}, optional: true}}
{{- end }}
{{- else }}
{{- $host := printf "%s:6379/0" (include "isthmus.componentName" (dict "root" .root "component" "redis")) }}
{{- if $v.redis.bundled.existingSecret }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $v.redis.bundled.existingSecret | quote }}, key: password}}
- name: ISTHMUS_STORE__URL
  value: "redis://:$(REDIS_PASSWORD)@{{ $host }}"
{{- else }}
- name: ISTHMUS_STORE__URL
  value: redis://{{ $host }}
{{- end }}
{{- end }}
{{- end -}}
