{{/* Arguments that follow the images' own, which are the command and --listen. */}}

{{- define "draftwire.drafterArgs" -}}
- --head=/models/{{ .Values.models.head }}
- --target=/models/{{ .Values.models.target }}
- --drain-timeout={{ .Values.drafter.drainTimeoutSeconds }}
{{- if .Values.drafter.colocated }}
- --listen=127.0.0.1:50052
{{- end }}
{{ include "draftwire.serverArgs" (dict "root" . "name" "drafter") }}
{{- if .Values.tls.enabled }}
- --tls-client-ca=/run/tls/ca.crt
{{- end }}
{{- end }}

{{- define "draftwire.verifierArgs" -}}
- --target=/models/{{ .Values.models.target }}
- --drafters={{ include "draftwire.drafters" . }}
- --drain-timeout={{ .Values.verifier.drainTimeoutSeconds }}
{{- with .Values.verifier.speculativeConfig }}
- {{ printf "--speculative-config=%s" (toJson .) | quote }}
{{- end }}
{{- if .Values.gateway.enabled }}
- --kv-events
{{- end }}
{{ include "draftwire.serverArgs" (dict "root" . "name" "verifier") }}
{{- if .Values.tls.enabled }}
- --drafter-tls-ca=/run/drafter-tls/ca.crt
- --drafter-tls-cert=/run/drafter-tls/tls.crt
- --drafter-tls-key=/run/drafter-tls/tls.key
{{- if .Values.tls.clientCertificates }}
- --tls-client-ca=/run/tls/ca.crt
{{- end }}
{{- end }}
{{- if .Values.tokens.secret }}
- --token-file=/run/tokens/tokens
{{- end }}
{{- end }}

{{- define "draftwire.serverArgs" -}}
{{- $ports := include "draftwire.ports" . | fromYaml -}}
- --health-listen=0.0.0.0:{{ $ports.health }}
{{- if .root.Values.tls.enabled }}
- --tls-cert=/run/tls/tls.crt
- --tls-key=/run/tls/tls.key
{{- else }}
- --insecure
{{- end }}
{{- if .root.Values.metrics.enabled }}
- --metrics-listen=0.0.0.0:{{ $ports.metrics }}
{{- end }}
{{- end }}
