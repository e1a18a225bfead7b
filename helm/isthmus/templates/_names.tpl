{{/* Names and labels. Selectors use name, instance and component only: they can never change. */}}

{{- define "isthmus.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Room is left for -COMPONENT and a suffix: 63 characters are the most a label or name may have. */}}
{{- define "isthmus.fullname" -}}
{{- $name := include "isthmus.name" . -}}
{{- $full := printf "%s-%s" .Release.Name $name -}}
{{- if .Values.fullnameOverride -}}{{- $full = .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}{{- $full = .Release.Name -}}{{- end -}}
{{- $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* {root, component} */}}
{{- define "isthmus.componentName" -}}
{{- printf "%s-%s" (include "isthmus.fullname" .root) .component -}}
{{- end -}}

{{- define "isthmus.selectorLabels" -}}
app.kubernetes.io/name: {{ include "isthmus.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "isthmus.labels" -}}
{{- $own := include "isthmus.selectorLabels" . | fromYaml -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $more := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/part-of" "isthmus" "app.kubernetes.io/managed-by" .root.Release.Service "helm.sh/chart" $chart -}}
{{- if has .component (list "prefill" "decode") -}}{{- $_ := set $more "isthmus.dev/pool" .component -}}{{- end -}}
{{- mergeOverwrite (deepCopy .root.Values.commonLabels) $more $own | toYaml -}}
{{- end -}}

{{/* {root, component, name?, labels?, annotations?}: metadata of a resource. */}}
{{- define "isthmus.metadata" -}}
name: {{ .name | default (include "isthmus.componentName" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- mergeOverwrite (deepCopy (.labels | default dict)) (include "isthmus.labels" . | fromYaml) | toYaml | nindent 2 }}
{{- with mergeOverwrite (deepCopy .root.Values.commonAnnotations) (deepCopy (.annotations | default dict)) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* {root, values}: what a component gives, over podDefaults. */}}
{{- define "isthmus.component" -}}
{{- mergeOverwrite (deepCopy .root.Values.podDefaults) (deepCopy .values) | toJson -}}
{{- end -}}

{{/* {root, component, c} */}}
{{- define "isthmus.serviceAccountName" -}}
{{- if .c.serviceAccount.create -}}
{{- .c.serviceAccount.name | default (include "isthmus.componentName" .) -}}
{{- else -}}
{{- .c.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* {root, image} */}}
{{- define "isthmus.image" -}}
{{- $registry := .root.Values.global.imageRegistry | default .image.registry -}}
{{- $name := .image.repository -}}
{{- if $registry -}}{{- $name = printf "%s/%s" $registry $name -}}{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Whether the chart itself renders router and pools; the operator does where it is given the cluster. */}}
{{- define "isthmus.rendersCluster" -}}
{{- if not (and .Values.operator.enabled .Values.cluster.create) -}}true{{- end -}}
{{- end -}}

{{- define "isthmus.rendersPools" -}}
{{- if and (include "isthmus.rendersCluster" .) (not .Values.ray.enabled) -}}true{{- end -}}
{{- end -}}
