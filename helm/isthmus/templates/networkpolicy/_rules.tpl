{{/* {to, port}: no peers = anywhere on that port. */}}
{{- define "isthmus.egressTo" -}}
- ports: [{port: {{ .port | int }}}]
  {{- with .to }}
  to: {{ toJson . }}
  {{- end }}
{{- end -}}

{{- define "isthmus.egressToApiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - port: {{ . | int }}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer }}
  to: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* {root, name: grpc|transfer}: actors of Ray, and ranks of NCCL, draw their ports. */}}
{{- define "isthmus.workerPeerPorts" -}}
{{- $port := get .root.Values.workerPorts .name | int -}}
{{- $isDrawn := or .root.Values.ray.enabled (and (eq .name "transfer") (has "nccl" .root.Values.transfer.planes)) -}}
{{- if $isDrawn }}[{port: 1024, endPort: 65535}]{{ else }}[{port: {{ $port }}}]{{ end -}}
{{- end -}}

{{/* {root, component}: pods of our own. */}}
{{- define "isthmus.peer" -}}
podSelector:
  matchLabels: {{- include "isthmus.selectorLabels" . | nindent 4 }}
{{- end -}}
