{{- define "ranker.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "ranker.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ranker.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "ranker.labels" -}}
{{ include "ranker.selector" . }}
app.kubernetes.io/version: {{ include "ranker.tag" . | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "ranker.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ include "ranker.tag" . }}
{{- end -}}
{{- end -}}

{{- define "ranker.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "ranker.name" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{/* Engine threads: as set, or whole cores of the CPU limit less one, at least 1. */}}
{{- define "ranker.engineThreads" -}}
{{- if .Values.engineThreads -}}
{{ .Values.engineThreads }}
{{- else -}}
{{- $limit := dig "limits" "cpu" "1" .Values.resources | toString -}}
{{- $cores := hasSuffix "m" $limit | ternary (div (trimSuffix "m" $limit | int) 1000) (floor $limit | int) -}}
{{ max 1 (sub $cores 1) }}
{{- end -}}
{{- end -}}
