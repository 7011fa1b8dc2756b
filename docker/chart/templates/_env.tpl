{{/* The container's environment: every RANKER_ variable that the chart knows, then the operator's. */}}
{{- define "ranker.env" -}}
- {name: RANKER_HOST, value: "0.0.0.0"}
- {name: RANKER_PORT, value: "8000"}
- {name: RANKER_MODEL, value: {{ .Values.model | quote }}}
- {name: RANKER_DRAIN_MS, value: {{ mul 1000 .Values.drainSeconds | quote }}}
- {name: RANKER_ENGINE_THREADS, value: {{ include "ranker.engineThreads" . | quote }}}
{{- if ne .Values.backend "auto" }}
- {name: RANKER_BACKEND, value: {{ .Values.backend | quote }}}
{{- end }}
{{- if .Values.gpu.enabled }}
- {name: RANKER_PLANS, value: /var/cache/ranker/plans}
{{- end }}
{{- if .Values.redis.secretName }}
- name: RANKER_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.secretName }}, key: {{ .Values.redis.secretKey }}}
{{- end }}
{{- if .Values.store.existingClaim }}
- {name: RANKER_STORE, value: /srv/store}
{{- else if .Values.store.url }}
- {name: RANKER_STORE, value: {{ .Values.store.url | quote }}}
{{- end }}
{{- if .Values.admin.tokenSecretName }}
- name: RANKER_ADMIN_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.admin.tokenSecretName }}, key: token}
{{- end }}
{{- if .Values.apiKeys.secretName }}
- name: RANKER_API_KEYS
  valueFrom:
    secretKeyRef: {name: {{ .Values.apiKeys.secretName }}, key: keys}
{{- end }}
{{- if ne .Values.tracing.provider "off" }}
- {name: RANKER_TRACING, value: {{ .Values.tracing.provider }}}
- {name: RANKER_SERVICE, value: {{ include "ranker.name" . }}}
- {name: RANKER_ENV, value: {{ .Values.datadog.env | quote }}}
{{- $otel := eq .Values.tracing.provider "otel" }}
{{- if not .Values.tracing.url }}
- name: HOST_IP
  valueFrom:
    fieldRef: {fieldPath: status.hostIP}
{{- end }}
- name: {{ ternary "RANKER_OTLP_URL" "RANKER_AGENT_URL" $otel }}
  value: {{ .Values.tracing.url | default (ternary "http://$(HOST_IP):4318" "http://$(HOST_IP):8126" $otel) | quote }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ printf "RANKER_%s" (upper $name) }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
