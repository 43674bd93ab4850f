{{/* Checks of combinations of values, with clearer errors than the schema's. */}}
{{- define "draftwire.checks" -}}
{{- $models := .Values.models -}}
{{- if $models.download.enabled }}
  {{- range $key := list "target" "head" }}
    {{- $id := index $models $key }}
    {{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$" $id) }}
      {{- fail (printf "models.%s = %q: with models.download.enabled it must be a hub id, organisation/model" $key $id) }}
    {{- end }}
  {{- end }}
{{- else if not (or $models.claim $models.hostPath) }}
  {{- fail "models.claim: give a claim or models.hostPath, or set models.download.enabled" }}
{{- end }}
{{- if and .Values.drafter.colocated .Values.drafter.autoscaling.enabled }}
  {{- fail "drafter.autoscaling.enabled: must be false with drafter.colocated, where drafters scale with the verifiers" }}
{{- end }}
{{- $verifier := .Values.verifier -}}
{{- $scaling := $verifier.autoscaling -}}
{{- if and $scaling.enabled (not (or $scaling.targetRequestsWaiting $scaling.targetRequestsRunning $scaling.targetCacheUsage)) }}
  {{- fail "verifier.autoscaling: give at least one of targetRequestsWaiting, targetRequestsRunning and targetCacheUsage" }}
{{- end }}
{{- if $verifier.service.headless }}
  {{- if ne $verifier.service.type "ClusterIP" }}
    {{- fail (printf "verifier.service.headless: needs verifier.service.type ClusterIP, not %s" $verifier.service.type) }}
  {{- end }}
  {{- if ne (int $verifier.service.port) 50051 }}
    {{- fail "verifier.service.headless: needs verifier.service.port 50051, because clients connect to the pods themselves" }}
  {{- end }}
{{- end }}
{{- if and .Values.gateway.enabled (or .Values.tls.enabled .Values.tokens.secret) }}
  {{- fail "gateway.enabled: needs tls.enabled false and tokens.secret empty, because smg calls verifiers in plain text and without tokens" }}
{{- end }}
{{- if and $verifier.grpcRoute.enabled (not $verifier.grpcRoute.parentRefs) }}
  {{- fail "verifier.grpcRoute.parentRefs: give the Gateway, such as [{name: gateway, namespace: gateways}]" }}
{{- end }}
{{- end }}
