{{/* A service's pods. */}}
{{- define "draftwire.pod" -}}
{{- $values := index .root.Values .name -}}
{{- $isShared := and (eq .name "verifier") .root.Values.drafter.colocated -}}
metadata:
  labels:
    {{- include "draftwire.selector" . | nindent 4 }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  {{- with include "draftwire.serviceAccount" .root }}
  serviceAccountName: {{ . }}
  {{- end }}
  enableServiceLinks: false
  # The preStop hook, the drain, and the end of the process.
  terminationGracePeriodSeconds: {{ add $values.drainTimeoutSeconds 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - topologyKey: {{ . }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "draftwire.selector" $ | nindent 10 }}
    {{- end }}
  {{- $downloads := .root.Values.models.download.enabled }}
  {{- $initContainers := $values.initContainers }}
  {{- if $isShared }}{{ $initContainers = concat $initContainers .root.Values.drafter.initContainers }}{{ end }}
  {{- if or $downloads $initContainers }}
  initContainers:
    {{- if $downloads }}
    {{- include "draftwire.downloads" . | trim | nindent 4 }}
    {{- end }}
    {{- with $initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - {{ include "draftwire.container" . | nindent 6 | trim }}
    {{- if $isShared }}
    - {{ include "draftwire.container" (dict "root" .root "name" "drafter") | nindent 6 | trim }}
    {{- end }}
  volumes:
    {{- include "draftwire.volumes" . | trim | nindent 4 }}
{{- end }}
