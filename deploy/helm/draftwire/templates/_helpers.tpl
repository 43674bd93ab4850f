{{/* Helpers for one service have a dict as argument: root (the chart's scope) and name (drafter or verifier). */}}

{{- define "draftwire.fullname" -}}
{{ printf "%s-%s" (trunc 50 .root.Release.Name | trimSuffix "-") .name }}
{{- end }}

{{- define "draftwire.selector" -}}
app.kubernetes.io/name: draftwire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "draftwire.metadata" -}}
name: {{ include "draftwire.fullname" . }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "draftwire.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Services with their own pods: a co-located drafter is a container of the verifier's pods. */}}
{{- define "draftwire.pods" -}}
{{ if .Values.drafter.colocated }}verifier{{ else }}drafter verifier{{ end }}
{{- end }}

{{/* Ports of a service by purpose, and the prefix of their names. Containers of one pod share its ports. */}}
{{- define "draftwire.ports" -}}
{{- if eq .name "verifier" -}}
{grpc: 50051, metrics: 9090, health: 9091, prefix: ""}
{{- else if .root.Values.drafter.colocated -}}
{grpc: 50052, metrics: 9092, health: 9093, prefix: "drafter-"}
{{- else -}}
{grpc: 50052, metrics: 9090, health: 9091, prefix: ""}
{{- end }}
{{- end }}

{{/* The name by which verifiers find drafters, which the drafters' certificate must have. */}}
{{- define "draftwire.drafters" -}}
{{- if .Values.drafter.colocated -}}
127.0.0.1:50052
{{- else -}}
{{ include "draftwire.fullname" (dict "root" . "name" "drafter") }}.{{ .Release.Namespace }}.svc:50052
{{- end }}
{{- end }}

{{- define "draftwire.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (trunc 63 .Release.Name | trimSuffix "-") "") }}
{{- end }}

{{/* Image of a service. */}}
{{- define "draftwire.image" -}}
{{- $image := (index .root.Values .name).image -}}
{{ printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) | quote }}
{{- end }}

{{/* A list of EnvVar from a map of values and sources. */}}
{{- define "draftwire.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  {{- if kindIs "string" $value }}
  value: {{ $value | quote }}
  {{- else }}
  valueFrom:
    {{- toYaml $value | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "draftwire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
