{{/* Helpers that belong to one service take a dict: root (the chart's scope) and name (drafter or verifier). */}}

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

{{- define "draftwire.port" -}}
{{ index (dict "drafter" 50052 "verifier" 50051) .name }}
{{- end }}

{{/* The name under which verifiers look drafters up, and which the drafters' certificate must have. */}}
{{- define "draftwire.drafters" -}}
{{ include "draftwire.fullname" (dict "root" . "name" "drafter") }}.{{ .Release.Namespace }}.svc:50052
{{- end }}

{{/* Whether a server serves. The kubelet's own gRPC probe speaks plain text only. */}}
{{- define "draftwire.probe" -}}
{{- if .root.Values.tls.enabled -}}
exec:
  command:
    - draftwire
    - health
    - --server=127.0.0.1:{{ include "draftwire.port" . }}
    - --timeout=8
    - --tls-ca=/run/tls/ca.crt
    - --tls-cert=/run/tls/tls.crt
    - --tls-key=/run/tls/tls.key
{{- else -}}
grpc:
  port: {{ include "draftwire.port" . }}
{{- end }}
timeoutSeconds: 10
{{- end }}
